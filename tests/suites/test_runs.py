"""Reports of foreign suites become verdicts in which only what two runs share is compared."""

import json
from base64 import b64encode

from suites.runs import case_verdicts, comply_verdicts, operation_verdicts
from suites.verdicts import differences
from suites.world import THROUGH


def comply(answer_id: str, status: str = "failed") -> str:
    complaint = (
        f"output.0: {{'id': '{answer_id}', 'content': {{}}}} is not valid under any of the given schemas"
    )
    return json.dumps({"results": [{"id": "basic", "status": status, "errors": [complaint]}]})


def test_ids_in_complaints_are_no_difference():
    assert differences("s", comply_verdicts(comply("rs_1")), comply_verdicts(comply("rs_2"))) == []


def test_another_status_is_a_difference():
    through = comply_verdicts(comply("rs_1", "passed"))
    assert differences("s", comply_verdicts(comply("rs_1")), through)[0].parts == ["verdict"]


def test_the_models_name_on_the_other_way_is_no_difference():
    def lines(model: str) -> str:
        saw = {"message": f"no {model} here", "models": [model, {"id": "str"}]}
        return json.dumps({"case": "chat", "outcome": "passed", "saw": saw})

    direct = case_verdicts(lines("tiny"), "tiny", "tiny")
    assert differences("s", direct, case_verdicts(lines(THROUGH), THROUGH, "tiny")) == []


def scenario(port: int, body: str = "a", status: int = 200, check: str = "success") -> dict[str, object]:
    request = {"method": "POST", "uri": f"http://127.0.0.1:{port}/tokenize?a=1", "body": body}
    answer = {"$base64": b64encode(b"{}").decode()}
    headers = {"content-type": ["application/json"], "date": [f"day {port}"]}
    response = {"status_code": status, "headers": headers, "content": answer}
    recorder = {
        "label": "POST /tokenize",
        "checks": {"x": [{"name": "not_a_server_error", "status": check}]},
        "interactions": {"x": {"request": request, "response": response}},
    }
    return {
        "ScenarioFinished": {
            "phase": "fuzzing",
            "status": check or "skip",
            "recorder": recorder,
        }
    }


def parts(through: dict[str, object]) -> list[str]:
    found = differences("s", operation_verdicts([scenario(1)]), operation_verdicts([through]))
    return [part for each in found for part in each.parts]


def test_operations_are_compared_request_by_request():
    assert parts(scenario(2)) == []
    assert parts(scenario(2, body="b")) == ["requests"]
    assert parts(scenario(2, status=400)) == ["answers"]
    assert parts(scenario(2, check="failure")) == ["verdict", "failed checks"]


def test_an_operation_that_nobody_tried_has_no_verdict():
    assert operation_verdicts([{"EngineStarted": {}}, scenario(1, check="")]) == {}
