"""An answer of SGLang's `/generate`, whole or from the events of its stream, as the tap meets it."""

from typing import Any

from proxy.answer_facts import ChoiceFact, Usage

META = "meta_info"


class GenerateAnswer:
    """The outputs of all prompts. A stream repeats a text from its beginning, or (as the server is set) goes
    on with it; its end is told by `[DONE]`."""

    def __init__(self) -> None:
        self.started = False
        self.finished = False
        self._texts: dict[int, str] = {}
        self._meta: dict[int, dict[str, Any]] = {}

    @staticmethod
    def knows(document: object) -> bool:
        """Whether a document belongs to such an answer."""
        return bool(_outputs(document))

    def take(self, document: object) -> bool:
        """Add such a document; whether it carried something the model generated."""
        outputs = _outputs(document)
        for place, output in enumerate(outputs):
            told = output.get("index")
            index = told if isinstance(told, int) else place
            text, before = output.get("text"), self._texts.get(index, "")
            if isinstance(text, str):
                self._texts[index] = text if text.startswith(before) else before + text
            self._meta[index] = output[META]
        self.started = True
        return any(output.get("text") or output.get("output_ids") for output in outputs)

    def facts(self) -> dict[str, Any]:
        """Fields of `AnswerFacts` besides the choices. Prompts and outputs of all are counted together."""
        metas = [self._meta[index] for index in sorted(self._meta)]
        response_id = metas[0].get("id") if metas else None
        cached = _count(metas[0].get("cached_tokens")) if len(metas) == 1 else -1
        return {
            "response_id": response_id if isinstance(response_id, str) else "",
            "usage": Usage(
                prompt_tokens=_count(metas[0].get("prompt_tokens")) if len(metas) == 1 else -1,
                completion_tokens=sum(max(_count(meta.get("completion_tokens")), 0) for meta in metas),
                cached_tokens=cached if cached >= 0 else None,
            ),
        }

    def choices(self) -> tuple[ChoiceFact, ...]:
        """Each output as a choice of a completion would be."""
        return tuple(
            ChoiceFact(
                index=index,
                content=self._texts.get(index) or None,
                finish_reason=_finish_reason(self._meta[index]),
            )
            for index in sorted(self._meta)
        )


def _outputs(document: object) -> list[dict[str, Any]]:
    listed = document if isinstance(document, list) else [document]
    found = [each for each in listed if isinstance(each, dict) and isinstance(each.get(META), dict)]
    return found if len(found) == len(listed) else []


def _finish_reason(meta: dict[str, Any]) -> str:
    told = meta.get("finish_reason")
    kind = told.get("type") if isinstance(told, dict) else told
    return kind if isinstance(kind, str) else ""


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
