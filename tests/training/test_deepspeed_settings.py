"""DeepSpeed's settings and logging, without training anything."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llmtrain.training.deepspeed import environment
from llmtrain.training.deepspeed.config import STRATEGIES, check_strategy, deepspeed_config


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_accepted_on_one_process(name: str) -> None:
    check_strategy(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "ddp"}, "choose one of single, deepspeed_1, deepspeed_2, deepspeed_3"),
        ({"name": "single", "devices": 2}, "runs one process, not 2; choose strategy=deepspeed_1"),
        ({"name": "deepspeed_1", "devices": 0}, "must both be at least 1"),
        ({"name": "deepspeed_3", "optimizer": "muon"}, "choose strategy=deepspeed_2 or optim.name=adamw"),
        ({"name": "deepspeed_2", "optimizer": "muon", "offload_optimizer": True}, "cannot be offloaded"),
        ({"name": "deepspeed_2", "offload_parameters": True}, "needs strategy=deepspeed_3"),
        ({"name": "single", "offload_optimizer": True}, "choose strategy=deepspeed_1, 2 or 3"),
        ({"name": "deepspeed_1", "grad_accum_dtype": "fp16"}, "choose fp32 or bf16"),
        ({"name": "deepspeed_1", "grad_accum_dtype": "bf16"}, "needs a bf16 run"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_strategy(**settings)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_checking_settings_imports_nothing_heavy() -> None:
    code = (
        "import sys; from llmtrain.training.deepspeed.config import check_strategy; check_strategy('deepspeed_1');"
        "print([name for name in ('torch', 'lightning', 'deepspeed') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_bf16_runs_accumulate_and_reduce_in_fp32_by_default() -> None:
    config = deepspeed_config(stage=1, accelerator="cpu", bf16=True)
    assert config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gpus_overlap_communication_and_pin_memory(stage: Any) -> None:
    config = deepspeed_config(stage=stage, accelerator="cuda", bf16=True, offload_optimizer=True)
    zero = config["zero_optimization"]
    assert zero["overlap_comm"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "contiguous_gradients" not in zero  # DeepSpeed's default, which a GPU wants


@pytest.fixture
def deepspeed_on_cpu() -> None:
    environment.prepare_import("cpu")


def test_deepspeeds_log_leaves_stdout_and_reaches_python_logging(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    theirs = logging.getLogger("a library that logs to stdout")
    theirs.propagate = False
    theirs.addHandler(logging.StreamHandler(sys.stdout))
    environment.redirect_logger(theirs)
    with caplog.at_level(logging.INFO):
        theirs.info("chatter")
    assert capsys.readouterr().out == ""
    assert "chatter" in caplog.text


@pytest.mark.usefixtures("deepspeed_on_cpu")
def test_prints_become_log_records(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), environment.quiet_stdout():
        print("ninja: no work to do.")
    assert capsys.readouterr().out == ""
    assert "ninja: no work to do." in caplog.text


def test_a_ninja_beside_the_interpreter_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ninja = tmp_path / "ninja"
    ninja.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    environment._add_environment_to_path()
    assert os.environ["PATH"] == str(tmp_path)


def test_the_lock_of_a_killed_build_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's extension builder would wait for it for ever. While a process of ours builds, the next one waits."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "some_op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    order = []

    def build() -> None:
        with environment._alone_in_the_build_folder("some_op"):
            assert not lock.exists()
            order.append("second")

    with environment._alone_in_the_build_folder("some_op"):
        assert not lock.exists()
        other = threading.Thread(target=build)
        other.start()
        other.join(0.3)
        order.append("first")
    other.join(10)
    assert order == ["first", "second"]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_interface_is_chosen_before_anybody_meets_on_gpus_too(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    """There NCCL carries the gradients, and a gloo group of ours the signals."""
    from types import SimpleNamespace

    from llmtrain.training.deepspeed import strategy as module

    done: list[str] = []
    monkeypatch.setattr(environment, "choose_interface", lambda address: done.append(address))
    monkeypatch.setattr(environment, "settle_shared_memory_op", lambda *arguments, **options: None)
    monkeypatch.setattr(environment, "close_process_group_at_exit", lambda: None)
    meet = lambda self: done.append("met")  # noqa: E731
    monkeypatch.setattr(module.LightningDeepSpeedStrategy, "setup_distributed", meet)
    monkeypatch.setattr(module.DeepSpeedStrategy, "_init_deepspeed_distributed", meet)
    monkeypatch.setattr(module.DeepSpeedStrategy, "set_world_ranks", lambda self: None)
    strategy = module.DeepSpeedStrategy(stage=2, accelerator="cpu")
    strategy._on_cpu = on_cpu
    strategy._num_nodes = 2
    strategy.parallel_devices = []
    strategy.cluster_environment = SimpleNamespace(main_address="10.0.0.1", world_size=lambda: 2)
    strategy.setup_distributed()
    assert done == ["10.0.0.1", "met"]
