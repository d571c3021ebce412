"""The package's public names: listed, importable, documented, and lazy."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib

import pytest

import pytest_klineage


def test_all_is_sorted_and_true() -> None:
    names = pytest_klineage.__all__
    assert names == sorted(names, key=lambda name: (name.startswith("__"), name)) or names == sorted(names)
    assert dir(pytest_klineage) == sorted(names)
    assert {*pytest_klineage._HOME_OF, "__version__"} == set(names)


@pytest.mark.parametrize("name", [name for name in pytest_klineage.__all__ if name != "__version__"])
def test_every_name_is_there_and_documented(name: str) -> None:
    found = getattr(pytest_klineage, name)
    assert found.__name__ == name
    assert found.__module__.startswith("pytest_klineage.")
    assert inspect.getdoc(found)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'kernel_cas'"):
        _ = pytest_klineage.kernel_cas


def test_every_public_name_loads_without_torch() -> None:
    code = (
        "import sys, pytest_klineage\n"
        "assert [name for name in sys.modules if name.startswith('pytest_klineage.')] == []\n"
        "for name in pytest_klineage.__all__: getattr(pytest_klineage, name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_the_one_of_the_distribution(pytestconfig: pytest.Config) -> None:
    project = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["project"]
    assert project["version"] == pytest_klineage.__version__
