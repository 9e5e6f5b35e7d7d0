from msl_host.fixtures import four_ways  # noqa: F401
