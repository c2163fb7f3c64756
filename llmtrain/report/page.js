// Two switches, language and light or dark; remembered where the browser lets a file remember.
"use strict";
(() => {
  const root = document.documentElement;
  const remember = (key, value) => { try { localStorage.setItem(`llmtrain-report-${key}`, value); } catch { /* private */ } };
  const recall = (key) => { try { return localStorage.getItem(`llmtrain-report-${key}`); } catch { return null; } };
  root.lang = recall("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");
  if (recall("theme")) root.dataset.theme = recall("theme");
  document.getElementById("language").addEventListener("click", () => {
    root.lang = root.lang === "zh" ? "en" : "zh";
    remember("language", root.lang);
  });
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    remember("theme", root.dataset.theme);
  });
})();
