"""`metrics.csv` continues without gap or repeat; W&B stays quiet, offline and on one run id."""

from typing import ClassVar

import pytest

from llmtrain.training import loggers, placement, wandb_server
from llmtrain.training.loggers import MetricsCsv, build_wandb, read_rows, run_id
from llmtrain.training.placement import BY_HAND, Placement


def test_the_figures_of_one_step_share_a_row(tmp_path):
    log = MetricsCsv(tmp_path / "metrics.csv")
    log.log_metrics({"train/loss": 3.0}, step=1)
    log.log_metrics({"train/loss": 2.5}, step=2)
    log.log_metrics({"val/loss": 2.75}, step=2)
    log.save()
    assert read_rows(tmp_path / "metrics.csv") == [
        {"step": "1", "train/loss": "3", "val/loss": ""},
        {"step": "2", "train/loss": "2.5", "val/loss": "2.75"},
    ]


def test_reopening_drops_only_the_rows_that_come_again(tmp_path):
    path = tmp_path / "metrics.csv"
    first = MetricsCsv(path)
    for step in range(1, 8):
        first.log_metrics({"train/loss": 1 / step}, step=step)
    first.finalize("success")
    with path.open("a") as file:
        file.write("8,0.1")  # killed in the middle of a line
    second = MetricsCsv(path, resumed_step=5)
    for step in range(6, 11):
        second.log_metrics({"train/loss": 1 / step}, step=step)
    second.save()
    rows = read_rows(path)
    assert [int(row["step"]) for row in rows] == list(range(1, 11))
    assert [float(row["train/loss"]) for row in rows] == pytest.approx([1 / step for step in range(1, 11)])


def test_a_fresh_start_leaves_nothing_of_the_old_file(tmp_path):
    MetricsCsv(tmp_path / "metrics.csv").log_metrics({"a": 1.0}, step=1)
    first = MetricsCsv(tmp_path / "metrics.csv")
    first.log_metrics({"a": 1.0}, step=1)
    first.save()
    MetricsCsv(tmp_path / "metrics.csv", resumed_step=0)
    assert not (tmp_path / "metrics.csv").exists()


def test_the_first_process_of_a_second_machine_writes_nothing(tmp_path, monkeypatch):
    """It has local rank 0, and is not rank 0."""
    log = MetricsCsv(tmp_path / "metrics.csv")
    log.log_metrics({"train/loss": 3.0}, step=1)
    log.save()
    monkeypatch.setattr(placement, "here", lambda: Placement(BY_HAND, node_rank=1))
    second = MetricsCsv(tmp_path / "metrics.csv")
    second.log_metrics({"train/loss": 2.0}, step=2)
    second.finalize("success")
    assert read_rows(tmp_path / "metrics.csv") == [{"step": "1", "train/loss": "3"}]
    build_wandb(tmp_path, project="x", mode="offline")
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv"}


def test_fp32_numbers_survive(tmp_path):
    import struct

    value = struct.unpack("f", struct.pack("f", 5.70393085))[0]
    log = MetricsCsv(tmp_path / "metrics.csv")
    log.log_metrics({"x": value, "tokens": 123_456_789_012}, step=1)
    log.save()
    (row,) = read_rows(tmp_path / "metrics.csv")
    assert struct.unpack("f", struct.pack("f", float(row["x"])))[0] == value
    assert row["tokens"] == "123456789012"


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_is_offline_without_a_login_and_keeps_its_run_id(tmp_path, monkeypatch):
    """No prompt, no connection, the id on disk before the first figure, the same after a resume."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    def refuse(*arguments, **options):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(wandb_server, "answers", refuse)
    identifiers = set()
    for first_step in (1, 3):
        log = build_wandb(tmp_path, project="test")
        identifiers.add(run_id(tmp_path))
        log.log_metrics({"train/loss": 1.0}, step=first_step)
        loggers.close([log])
    (identifier,) = identifiers
    folders = [path.name for path in (tmp_path / "wandb").glob("*run-2*")]
    assert folders
    assert all(name.startswith("offline-run-") and f"-{identifier}" in name for name in folders)


def wandb_records(path):
    """The records of an offline file, which is laid out as LevelDB's log, up to where a kill cut it short."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block that is too short for a header
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4) and at <= len(data):  # whole, or the last part
            yield record
            record = b""


def wandb_history(run_dir):
    """Every (step, figure, value) in the offline files of all sessions."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in (run_dir / "wandb").glob("offline-run-*/*.wandb"):
        for record in map(Record.FromString, wandb_records(path)):
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            for name, value in items.items():
                yield int(items["trainer/global_step"]), name, value


@pytest.mark.slow
def test_a_killed_run_stays_one_run_for_wandb(nursery, tmp_path):
    """Offline, 60 steps, killed at 30, resumed: one id; what comes twice is equal; `metrics.csv` is whole."""
    settings = {"steps": 60, "checkpoint_every": 7, "val_every": 15, "rows": 1, "accumulation": 1}
    settings |= {"wandb": {"project": "toy", "mode": "offline"}, "train_tokens": 1000}
    stop = {"rank": 0, "step": 30, "name": "SIGKILL"}
    killed = nursery.run(tmp_path, fails=True, signal=stop, **settings)
    assert killed["codes"] == [-9]
    first = run_id(tmp_path)
    assert nursery.run(tmp_path, resume="auto", **settings)["resumed_from"] == 28
    assert run_id(tmp_path) == first
    assert {path.stem for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")} == {f"run-{first}"}
    assert [int(row["step"]) for row in read_rows(tmp_path / "metrics.csv")] == list(range(1, 61))
    values = {}
    for step, name, value in wandb_history(tmp_path):
        if name in ("train/loss", "train/lr", "train/grad_norm", "val/loss", "tokens"):
            values.setdefault((step, name), []).append(f"{float(value):.9g}")  # as in `metrics.csv`
    assert {step for step, name in values if name == "train/loss"} == set(range(1, 61))
    assert {step for step, name in values if name == "val/loss"} == {15, 30, 45, 60}
    assert all(len(set(found)) == 1 for found in values.values())


def test_a_resumed_run_gives_wandb_the_last_half_minute_again():
    """A kill takes away what W&B had not written yet; the rows before are not sent twice."""
    rows = [{"step": str(10 * n), "loss": f"{1 / n}", "seconds": f"{20.0 * n}", "val": ""} for n in range(1, 6)]
    rows.insert(4, {"step": "45", "loss": "", "seconds": "", "val": "0.5"})  # a validation alone

    class Log:
        seen: ClassVar[list] = []

        def log_metrics(self, figures, step):
            self.seen.append((step, figures))

    loggers.repeat_last(Log(), rows)
    assert Log.seen == [
        (40, {"loss": 0.25, "seconds": 80.0}),
        (45, {"val": 0.5}),
        (50, {"loss": 0.2, "seconds": 100.0}),
    ]
    loggers.repeat_last(Log(), [])


@pytest.fixture
def begun(monkeypatch):
    """The mode of every run that W&B is asked to begin."""
    import wandb

    class Run:
        def define_metric(self, *arguments, **options):
            pass

    modes: list[str] = []
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "init", lambda **options: modes.append(options["mode"]) or Run())
    return modes


@pytest.mark.parametrize("login", [True, False])
@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("variable", [None, "online", "offline", "dryrun", "disabled"])
@pytest.mark.parametrize("mode", ["auto", "online", "offline"])
def test_a_setting_wins_over_the_variable_and_online_insists(
    tmp_path, monkeypatch, begun, mode, variable, answers, login
):
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setattr(wandb_server, "has_login", lambda: login)
    monkeypatch.setattr(wandb_server, "answers", lambda host, port: answers)
    reachable = login and answers
    if mode == "online" and not reachable:
        sentence = "does not answer" if login else "run `wandb login`"
        with pytest.raises(ValueError, match=rf"logger\.mode=online: .*{sentence}.*; or take logger\.mode=offline"):
            build_wandb(tmp_path, project="test", mode=mode)
        assert begun == []
        return
    log = build_wandb(tmp_path, project="test", mode=mode)
    if mode == "auto" and variable == "disabled":
        assert log is None
        assert list(tmp_path.iterdir()) == []
        return
    stays = mode == "offline" or (mode == "auto" and variable in ("offline", "dryrun"))
    assert begun == ["offline" if stays or not reachable else "online"]


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_itself_lets_the_setting_win(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log = build_wandb(tmp_path, project="test", mode="offline")
    assert log is not None
    log.log_metrics({"train/loss": 1.0}, step=1)
    loggers.close([log])
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_a_disabled_wandb_leaves_metrics_alone(train, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    train(tmp_path, steps=2, wandb={"project": "test"})
    assert len(read_rows(tmp_path / "metrics.csv")) == 2
    assert not (tmp_path / "wandb").exists()
    assert run_id(tmp_path) is None


def test_a_login_is_found_where_wandb_looks(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_IDENTITY_TOKEN_FILE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not wandb_server.has_login()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / "netrc").chmod(0o600)
    assert wandb_server.has_login()
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.wandb.ai:8443")
    assert wandb_server.has_login()  # the file knows hosts without ports


@pytest.mark.parametrize(
    ("variables", "host", "port"),
    [
        ({}, "api.wandb.ai", 443),
        ({"WANDB_BASE_URL": "http://wandb.local"}, "wandb.local", 80),
        ({"WANDB_BASE_URL": "http://wandb.local:8080/path"}, "wandb.local", 8080),
        ({"WANDB_BASE_URL": "https://[::1]:9"}, "::1", 9),
        ({"HTTPS_PROXY": "http://user:secret@proxy.local:3128"}, "proxy.local", 3128),
        ({"HTTPS_PROXY": "proxy.local:3128"}, "proxy.local", 3128),
        ({"HTTPS_PROXY": "http://proxy.local:3128", "NO_PROXY": ".wandb.ai"}, "api.wandb.ai", 443),
        ({"HTTPS_PROXY": "http://proxy.local:3128", "WANDB_BASE_URL": "http://wandb.local"}, "wandb.local", 80),
        ({"HTTP_PROXY": "http://proxy.local", "WANDB_BASE_URL": "http://wandb.local"}, "proxy.local", 80),
    ],
)
def test_the_connection_that_is_tried_is_the_one_that_wandb_opens(monkeypatch, variables, host, port):
    for name in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wandb_server.address()[:2] == (host, port)


def test_a_host_answers_or_is_noticed_in_time():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert wandb_server.answers("127.0.0.1", port)
    assert not wandb_server.answers("127.0.0.1", port, seconds=0.5)


def test_an_unknown_wandb_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"logger\.mode='sometimes' must be auto, online or offline"):
        build_wandb(tmp_path, project="test", mode="sometimes")
