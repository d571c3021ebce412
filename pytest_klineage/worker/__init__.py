"""The processes that the judge starts: `python -m pytest_klineage.worker oracle|template`. Nobody imports this package."""
