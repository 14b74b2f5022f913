"""Errors of the engine that end one request, not the server."""


class EngineGenerateError(RuntimeError):
    """The engine could not finish a request for a reason that is not the client's."""


class EngineOverloadedError(EngineGenerateError):
    """The engine has no room for a request now; it can be sent again."""
