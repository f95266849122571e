"""A name that vLLM's tests import."""


class LocalAssetServer:
    """Serves pictures, of which no test here has any."""
