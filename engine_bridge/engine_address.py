"""How one of several engines is reached, by whoever asks it something beside the calls."""

from collections.abc import Mapping

import msgspec


class EngineAddress(msgspec.Struct, frozen=True):
    """`url` is the base URL, with or without `/v1`; `name` what people call the engine, empty for the only
    one; `key` the engine's own key, empty for none."""

    url: str
    name: str = ""
    key: str = ""

    @property
    def base(self) -> str:
        """The URL that paths stand behind, without `/v1` and without a slash."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def headers(self) -> Mapping[str, str]:
        """What every request carries."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def named(self, text: str) -> str:
        """The text as one about this engine, where there are several."""
        return f"engine {self.name}: {text}" if self.name else text
