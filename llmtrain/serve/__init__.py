"""Conversations with a model, for people and for programs; each module is imported where it is used."""
