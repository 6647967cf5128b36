"""How many sockets this process may have open: two for each call."""

import contextlib
import resource


def raise_file_limit() -> int:
    """Take as many open files as the system lets us have without asking; answers how many that is.

    A shell's or a service's usual limit, 1,024, is for programs that use `select`; it ends at 500 streams.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Where "unlimited" is more than the kernel gives, what we have has to do.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
