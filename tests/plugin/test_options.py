"""Every option from the command line and from the ini file; bad values end in one line that says what is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_klineage.gate.host import gpus
from pytest_klineage.lab.plugin import OPTIONS as LAB_OPTIONS
from pytest_klineage.plugin.options import GATE_KEYS, OPTIONS, Option, option_value, read_settings
from pytest_klineage.plugin.session import KlineageSession

ALL = OPTIONS + LAB_OPTIONS
SAMPLES: dict[str, tuple[str, Any]] = {
    "sanitize": ("memcheck,racecheck", ["memcheck,racecheck"]),
    "platform": ("cpu", "cpu"),
    "executor": ("batch:asked", "batch:asked"),
    "priority": ("10", 10),
    "gpu-product": ("H200", "H200"),
    "mode": ("record", "record"),
    "stage": ("compile", "compile"),
    "artifacts": ("some/built", "some/built"),
    "policy": ("paper", "paper"),
    "also-policy": ("paper", ["paper"]),
    "margin": ("0.1", 0.1),
    "precision": ("0.02", 0.02),
    "confidence": ("0.9", 0.9),
    "time-limit": ("3.5", 3.5),
    "busy-limit": ("0.5", 0.5),
    "spread-limit": ("3", 3.0),
    "seed": ("monday", "monday"),
    "seeds": ("7", 7),
    "threads": ("1", 1),
    "flush": ("48MiB", 48 << 20),
    "cache-dir": ("some/cache", "some/cache"),
    "results": ("some/results", "some/results"),
    "run": ("trial", "trial"),
    "build-timeout": ("60", 60.0),
    "load-timeout": ("90", 90.0),
    "run-timeout": ("5", 5.0),
    "method": ("naive", ["naive"]),
    "progress": ("off", "off"),
    "json": ("out.json", "out.json"),
    "fail-skipped": ("true", True),
    "save": ("main", "main"),
    "compare": ("main", "main"),
    "compare-fail": ("slower:3%", "slower:3%"),
    "base": ("../base", "../base"),
    "summary": ("summary.md", "summary.md"),
    "llm": ("exchange", "exchange"),
    "model": ("toy", "toy"),
    "budget": ("2.5", 2.5),
    "prices": ("my.toml", "my.toml"),
    "command": ("ask", "ask"),
    "exchange": ("some/asked", "some/asked"),
    "trajectories": ("some/kept", "some/kept"),
    "screen": ("true", True),
    "resume": ("gemm/1", "gemm/1"),
}
BAD = {
    "compare-fail": ("3%", "'3%' is not of the form slower:3%, with a percentage above 0 and below 100"),
    "sanitize": ("memchek", "'memchek' is not one of: memcheck, racecheck, initcheck, synccheck, all"),
    "executor": ("remote", "'remote' is not one of: local, batch:DIR, ray[[]://HOST:PORT]"),
    "priority": ("high", "'high' is not a whole number"),
    "mode": ("strict", "'strict' is not one of: gate, record"),
    "stage": ("link", "'link' is not one of: all, compile"),
    "llm": ("oracle", "'oracle' is not one of: none, anthropic, command, exchange, replay"),
    "budget": ("-1", "-1 must be at least 0"),
    "progress": ("maybe", "'maybe' is not one of: auto, on, off"),
    "margin": ("1", "1 must be at least 0 and below 1"),
    "precision": ("0", "0 must be above 0 and below 1"),
    "seeds": ("2.5", "'2.5' is not a whole number"),
    "threads": ("-1", "-1 must be at least 0"),
    "spread-limit": ("1", "1 must be above 1"),
    "flush": ("64 x", "'64 x' is not a size such as 64M, 1G or 0"),
    "time-limit": ("soon", "'soon' is not a number"),
    "run": ("", "must not be empty"),
}
UNKNOWN = {
    "platform": (
        "sm91",
        "unknown platform 'sm91'. Did you mean 'sm90'? Valid: auto, cpu, sm100, sm103, sm120, sm80, sm86, sm89, sm90.",
    ),
    "policy": ("pared", "unknown timing policy 'pared'. Did you mean 'paired'? Valid: *paired*paper*"),
    "also-policy": ("papers", "unknown timing policy 'papers'. Did you mean 'paper'?*"),
}


def named(name: str) -> Option:
    return next(option for option in ALL if option.name == name)


def test_every_option_has_a_sample() -> None:
    assert set(SAMPLES) == {option.name for option in ALL}


@pytest.mark.parametrize("name", SAMPLES)
def test_command_line_and_ini(pytester: pytest.Pytester, name: str) -> None:
    text, value = SAMPLES[name]
    option = named(name)
    assert option_value(pytester.parseconfig(), option) is None
    given = f"{option.flag}={text}" if option.metavar else option.flag
    assert option_value(pytester.parseconfig(given), option) == value
    pytester.makeini(f"[pytest]\n{option.key} = {text}\n")
    assert option_value(pytester.parseconfig(), option) == value


@pytest.mark.parametrize(
    ("name", "ini", "line", "value"), [("seeds", "3", "5", 5), ("method", "naive", "expert", ["expert"])]
)
def test_the_command_line_wins(pytester: pytest.Pytester, name: str, ini: str, line: str, value: object) -> None:
    option = named(name)
    pytester.makeini(f"[pytest]\n{option.key} = {ini}\n")
    assert option_value(pytester.parseconfig(f"{option.flag}={line}"), option) == value


def test_repeatable_options_add_up(pytester: pytest.Pytester) -> None:
    line = ("--klineage-method=naive", "--klineage-method=expert", "--klineage-method=naive")
    assert read_settings(pytester.parseconfig(*line)).methods == ("naive", "expert")
    pytester.makeini("[pytest]\nklineage_method = naive expert\nklineage_also_policy = paper\n")
    settings = read_settings(pytester.parseconfig())
    assert settings.methods == ("naive", "expert")
    assert settings.gate == {"also_policies": ("paper",)}


def test_defaults_leave_the_gates_own_alone(pytester: pytest.Pytester) -> None:
    settings = read_settings(pytester.parseconfig())
    assert settings.gate == {}
    assert settings.given == ()
    assert (settings.platform, settings.mode, settings.methods, settings.progress) == (
        "auto",
        "gate",
        ("expert",),
        "auto",
    )
    assert settings.results == pytester.path / "results"


def test_a_flag_has_a_boolean_ini_option(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nklineage_fail_skipped = no\n")
    assert not read_settings(pytester.parseconfig()).fail_skipped
    assert read_settings(pytester.parseconfig("--klineage-fail-skipped")).fail_skipped
    pytester.makeini("[pytest]\nklineage_fail_skipped = perhaps\n")
    with pytest.raises(pytest.UsageError, match="'perhaps' is not one of: true, false"):
        read_settings(pytester.parseconfig())


def test_every_setting_of_the_gate_is_one() -> None:
    from pytest_klineage.gate import GateSettings

    assert set(GATE_KEYS.values()) <= set(GateSettings.__struct_fields__)


def test_paths_are_relative_to_where_they_were_written(pytester: pytest.Pytester) -> None:
    inner = pytester.mkdir("inner")
    pytester.makeini("[pytest]\nklineage_results = from_ini\nklineage_cache_dir = ~/cached\n")
    config = pytester.parseconfig("--rootdir", str(pytester.path), "--klineage-json=out.json", str(inner))
    settings = read_settings(config)
    assert settings.results == pytester.path / "from_ini"
    assert settings.json == pytester.path / "out.json"
    assert settings.gate["cache_dir"] == Path("~/cached").expanduser()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_a_usage_error(pytester: pytest.Pytester, name: str) -> None:
    text, message = BAD[name]
    option = named(name)
    result = pytester.runpytest(f"{option.flag}={text}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{message}*"])
    if text:
        pytester.makeini(f"[pytest]\n{option.key} = {text}\n")
        result = pytester.runpytest()
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: {option.key} in *tox.ini: {message}"])


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_is_a_usage_error_before_collection(pytester: pytest.Pytester, name: str) -> None:
    text, message = UNKNOWN[name]
    pytester.makepyfile("raise SystemExit('collected')")
    result = pytester.runpytest(f"{named(name).flag}={text}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    result.stdout.no_fnmatch_line("*collected*")


@pytest.mark.parametrize("name", ["sm90", "sm120"])
def test_a_platform_without_its_gpu_is_a_usage_error(
    pytester: pytest.Pytester, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "gpus", lambda: ())
    pytester.makepyfile("raise SystemExit('collected')")
    message = f"ERROR: platform {name} needs a GPU of compute capability *"
    result = pytester.runpytest(f"--klineage-platform={name}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*collected*")
    pytester.makeini(f"[pytest]\nklineage_platform = {name}\n")
    pytester.runpytest().stderr.fnmatch_lines([message])


@pytest.mark.parametrize("arguments", [(), ("--klineage-platform=auto",)])
def test_auto_takes_the_gpu_that_the_machine_has(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(gpus, "best_platform", lambda: "sm90")
    monkeypatch.setattr(gpus, "gpus_for", lambda name: ())
    assert KlineageSession(pytester.parseconfig(*arguments)).platform == "sm90"
    assert KlineageSession(pytester.parseconfig("--klineage-platform=cpu")).platform == "cpu"


def test_values_that_the_gate_refuses_are_usage_errors(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--klineage-confidence=0.2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: confidence must lie between 0.5 and 0.995, got 0.2"])


def test_the_header_shows_what_was_asked_for(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--klineage-platform=cpu", "--klineage-mode=record", "--klineage-policy=paper")
    result.stdout.fnmatch_lines(["klineage: platform=cpu mode=record policy=paper"])
    result = pytester.runpytest("--klineage-platform=cpu", "--klineage-seed=monday")
    result.stdout.fnmatch_lines(["klineage: platform=cpu mode=gate seed=monday"])


def test_the_header_says_that_workers_show_no_progress(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_plain(): pass")
    result = pytester.runpytest("-n1", "--klineage-platform=cpu")
    result.stdout.fnmatch_lines(["klineage: platform=cpu mode=gate (no live progress with -n)"])


def test_the_short_platform_of_this_repository(pytester: pytest.Pytester, pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "conftest.py").read_text()
    pytester.makeconftest(text.replace('pytest_plugins = ["pytester"]', ""))
    assert read_settings(pytester.parseconfig("--platform", "cpu")).platform == "cpu"
    assert read_settings(pytester.parseconfig("--klineage-platform", "cpu")).platform == "cpu"
    pytester.makeini("[pytest]\nklineage_platform = cpu\n")
    assert read_settings(pytester.parseconfig()).platform == "cpu"
