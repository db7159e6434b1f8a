"""What the tests of cases share with the integration tests: one Redis a session."""

from tests.integration.conftest import _redis_processes, redis_client, valkey

__all__ = ["_redis_processes", "redis_client", "valkey"]
