"""As many open files as the system allows."""

import resource

from proxy.file_limit import raise_file_limit


def test_the_limit_is_the_systems_and_not_the_shells() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert raise_file_limit() == hard
        assert raise_file_limit() == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
