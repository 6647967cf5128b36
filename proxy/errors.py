"""Errors of the proxy's own making. HTTP statuses are assigned to them in `problems.py` and nowhere else.

ProxyError
├── Refused                 we do not forward this request
│   ├── Unauthenticated     no key, or none we know
│   ├── Forbidden           the key's scopes do not reach this
│   ├── InvalidRequest      the request to our own API, or its framing, makes no sense
│   ├── NoSuchPath          our own API has no such path
│   ├── MethodRefused       the path is there, but not with this method
│   ├── BodyTooLarge        the body passes the configured cap
│   ├── TooManyCalls        the tenant has as many calls under way as it may
│   └── Draining            the process is about to stop
├── UpstreamError           the engine did not answer as HTTP demands
│   ├── ConnectFailed       no connection; nothing was sent
│   ├── EngineFull          it has as many calls under way as it may; nothing was sent
│   ├── FirstByteTimeout    connected, but no answer began in time
│   └── UpstreamBroken      reset, silence or bad framing; part of the request or the answer was on its way
└── ClientGone              the client hung up; nobody is left to answer
"""


class ProxyError(Exception):
    """Root of the proxy's errors. `str()` is fit to be shown to the client."""


class Refused(ProxyError):
    """We do not forward this request."""


class Unauthenticated(Refused):
    """No key, or none we know."""


class Forbidden(Refused):
    """The key's scopes do not reach this."""


class InvalidRequest(Refused):
    """The request to our own API, or its framing, makes no sense."""


class NoSuchPath(Refused):
    """Our own API has no such path."""


class MethodRefused(Refused):
    """The path is there, but not with this method."""


class BodyTooLarge(Refused):
    """The body passes the configured cap."""


class TooManyCalls(Refused):
    """The tenant has as many calls under way as it may."""


class Draining(Refused):
    """The process is about to stop."""


class UpstreamError(ProxyError):
    """The engine did not answer as HTTP demands."""


class ConnectFailed(UpstreamError):
    """No connection; nothing was sent."""


class EngineFull(UpstreamError):
    """The engine has as many calls under way as it may; nothing was sent."""


class FirstByteTimeout(UpstreamError):
    """Connected, but no answer began in time."""


class UpstreamBroken(UpstreamError):
    """Reset, silence or bad framing; part of the request or the answer was on its way."""


class ClientGone(ProxyError):
    """The client hung up; nobody is left to answer."""
