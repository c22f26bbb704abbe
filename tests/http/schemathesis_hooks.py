"""Generated keys repeat, and a valid payment under the key of another one is a mismatch: every valid key is made new."""

import re
import uuid

import schemathesis
from schemathesis.core.parameters import ParameterLocation


@schemathesis.hook
def before_call(context, case, kwargs):
    meta = case.meta
    # Schemathesis takes headers that were touched for valid ones, and then puts back those that it left out.
    if meta and meta.generation.mode.is_negative and meta.phase.data.parameter_location == ParameterLocation.HEADER:
        return
    for parameter in context.operation.headers:
        if parameter.name == "idempotency-key":
            key = (case.headers or {}).get(parameter.name)
            pattern = parameter.definition["schema"]["pattern"]
            if isinstance(key, str) and re.fullmatch(pattern, key.strip(" \t")):
                case.headers[parameter.name] = str(uuid.uuid4())
