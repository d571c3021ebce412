"""The processes that the judge starts by `python -m pytest_klineage.worker`; no other package imports this one."""
