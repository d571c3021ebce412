"""GPUs for xdist's workers, with a fake of nvidia-ml-py that shows two H200: no GPU is here, and none is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_klineage.plugin.distribution import Distribution, num_workers, pytest_xdist_auto_num_workers
from pytest_klineage.plugin.session import KlineageSession
from pytest_klineage.records.device import Gpu

FAKE = Path(__file__).parents[1] / "unit" / "gate" / "host" / "fake_pynvml.py"
CONFTEST = """
import os, pathlib

worker = os.environ.get("PYTEST_XDIST_WORKER")
if worker:
    # At import: the worker has done nothing yet.
    pathlib.Path(__file__).with_name(f"{worker}.txt").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
"""
FIRST, SECOND = (f"GPU-{number:08d}-1111-2222-3333-444444444444" for number in range(2))


@pytest.fixture
def two_gpus(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of inner tests where nvidia-ml-py shows two GPUs."""
    (pytester.path / "pynvml.py").write_text(FAKE.read_text())
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("def test_plain(): pass")
    return pytester.path


def devices(folder: Path) -> dict[str, str]:
    """What each worker could see when it began."""
    return {path.stem: path.read_text() for path in sorted(folder.glob("gw*.txt"))}


def test_each_worker_begins_with_a_gpu_of_its_own(two_gpus: Path, pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-n2", "--klineage-platform=sm90")
    result.assert_outcomes(passed=1)
    assert devices(two_gpus) == {"gw0": FIRST, "gw1": SECOND}
    result.stdout.fnmatch_lines([f"klineage: 2 workers on 2 GPUs: NVIDIA H200 {FIRST}, NVIDIA H200 {SECOND}"])


@pytest.mark.nightly
def test_more_workers_than_gpus_share_them(two_gpus: Path, pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-n3", "--klineage-platform=sm90")
    assert devices(two_gpus) == {"gw0": FIRST, "gw1": SECOND, "gw2": FIRST}
    result.stdout.fnmatch_lines(["klineage: 3 workers on 2 GPUs: * (timed in turns)"])


def test_only_visible_gpus_are_handed_out(
    two_gpus: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    result = pytester.runpytest_subprocess("-n2", "--klineage-platform=sm90")
    assert devices(two_gpus) == {"gw0": SECOND, "gw1": SECOND}
    result.stdout.fnmatch_lines([f"klineage: 2 workers on 1 GPU: NVIDIA H200 {SECOND} (timed in turns)"])


def test_the_users_own_choice_for_a_worker_stays(two_gpus: Path, pytester: pytest.Pytester) -> None:
    specs = ("--tx=popen//env:CUDA_VISIBLE_DEVICES=7", "--tx=popen", "--dist=load", "--max-worker-restart=2")
    pytester.runpytest_subprocess(*specs, "--klineage-platform=sm90")
    assert devices(two_gpus) == {"gw0": "7", "gw1": SECOND}


def test_the_successor_of_a_crashed_worker_gets_its_gpu(two_gpus: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_crash="""
        import os, pytest

        @pytest.mark.parametrize("number", range(4))
        def test_crash(number):
            if os.environ["PYTEST_XDIST_WORKER"] == "gw1":
                os._exit(1)
        """
    )
    pytester.runpytest_subprocess("-n2", "--klineage-platform=sm90", "test_crash.py")
    seen = devices(two_gpus)
    assert seen["gw1"] == SECOND
    assert set(seen) > {"gw0", "gw1"}
    assert {device for worker, device in seen.items() if worker != "gw0"} == {SECOND}


def test_on_a_cpu_nothing_is_handed_out(two_gpus: Path, pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-n2", "--klineage-platform=cpu")
    result.assert_outcomes(passed=1)
    assert set(devices(two_gpus).values()) == {"unset"}
    result.stdout.no_fnmatch_line("*workers on*")


def test_without_a_gpu_of_the_platform_nothing_is_handed_out(two_gpus: Path, pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-n1", "--klineage-platform=sm120")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert devices(two_gpus) == {}


def test_without_workers_the_header_says_nothing_of_them(two_gpus: Path, pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--klineage-platform=sm90")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*workers on*")


@pytest.mark.nightly
@pytest.mark.parametrize("absent", ["xdist", "terminal"])
def test_other_plugins_may_be_absent(two_gpus: Path, pytester: pytest.Pytester, absent: str) -> None:
    result = pytester.runpytest_subprocess("-p", f"no:{absent}", "--klineage-platform=sm90")
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(("--klineage-platform=sm90",), 2), (("--klineage-platform=cpu",), 5), ((), 5)],
    ids=["gpus", "cpu", "not-used"],
)
def test_auto_is_the_number_of_gpus_on_a_gpu_platform(
    two_gpus: Path, pytester: pytest.Pytester, arguments: tuple[str, ...], expected: int
) -> None:
    pytester.makeconftest(CONFTEST)
    # What xdist would take otherwise, whatever machine this is.
    (two_gpus / "five.py").write_text(
        "import xdist.plugin\nxdist.plugin.pytest_xdist_auto_num_workers.__code__ = (lambda config: 5).__code__\n"
    )
    pytester.runpytest_subprocess("-p", "five", "-nauto", "--maxprocesses=3", *arguments).assert_outcomes(passed=1)
    assert len(devices(two_gpus)) == min(expected, 3)


def test_auto_respects_the_user_and_the_compile_stage(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(index=0, uuid=FIRST, name="NVIDIA H200", capability="9.0")
    monkeypatch.setattr("pytest_klineage.plugin.distribution.session_gpus", lambda session: (gpu,) * 8)
    config = pytester.parseconfig("--klineage-platform=cpu")
    assert pytest_xdist_auto_num_workers(config) == 8
    config.option.klineage_stage = "compile"
    assert pytest_xdist_auto_num_workers(config) is None
    config.option.klineage_stage = "all"
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert pytest_xdist_auto_num_workers(config) is None


def test_workers_on_other_machines_are_left_alone(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig("--klineage-platform=cpu")
    distribution = Distribution(KlineageSession(config))
    distribution.gpus = (Gpu(index=0, uuid=FIRST, name="NVIDIA H200", capability="9.0"),)
    there, here, proxied = (SimpleNamespace(popen=popen, via=via, env={}) for popen, via in
                            ((None, None), (True, None), (True, "proxy")))  # fmt: skip
    distribution.pytest_xdist_setupnodes([there, here, proxied])
    assert (there.env, here.env, proxied.env) == ({}, {"CUDA_VISIBLE_DEVICES": FIRST}, {})


@pytest.mark.parametrize(("tx", "expected"), [([], 0), (["popen"], 1), (["3*popen", "ssh=other"], 4), (None, 0)])
def test_workers_are_counted(tx: Any, expected: int) -> None:
    config: Any = SimpleNamespace(
        getoption=lambda name, default: tx, pluginmanager=SimpleNamespace(hasplugin=lambda name: name == "dsession")
    )
    assert num_workers(config) == expected


def test_a_run_that_uses_nothing_asks_no_driver(two_gpus: Path, pytester: pytest.Pytester) -> None:
    (two_gpus / "pynvml.py").write_text(f"open({str(two_gpus / 'asked')!r}, 'w')\n")
    result = pytester.runpytest_subprocess("-n2")
    result.assert_outcomes(passed=1)
    assert set(devices(two_gpus).values()) == {"unset"}
    result.stdout.no_fnmatch_line("*workers on*")
    assert not (two_gpus / "asked").exists()


def test_the_session_knows_its_own_distribution(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfigure()
    assert isinstance(config.pluginmanager.getplugin("klineage-distribution"), Distribution)
