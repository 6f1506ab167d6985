"""Makes practice.json: schemas as people send them, and values that an independent validator allows or refuses.

    python make_practice.py > practice.json     # needs jsonschema (scripts/golden-requirements.txt)

Each line is {"name", "schema", "allowed": [JSON text], "refused": [JSON text]}. The verdicts are those of jsonschema's
Draft202012Validator, or of its Draft7Validator where the schema has `dependencies`, which later drafts ignore. No text holds an
object whose properties stand in another order than the schema's.
"""

import copy
import json
import random

from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker

DRAWS = random.Random(20261128)
WORDS = ["alpha", "beta", "gamma", "delta", "omega", "kappa", "sigma", "theta"]
OTHERS = [None, True, False, 7, -3, 2.5, "", "zz", "a b", [], {}, [1], {"zz": 1}, 100000]
TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 99}
CHECKED = {"date", "ipv4", "uuid", "email"}


def words(count):
    return DRAWS.sample(WORDS, count)


def closed(properties, required=None, **more):
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def tagged_choices():
    tags = words(3)
    choices = [closed({"kind": {"const": tag}, f"{tag}_value": kind}) for tag, kind in zip(tags, [TEXT, COUNT, FLAG])]
    values = [{"kind": tags[0], f"{tags[0]}_value": "x"}, {"kind": tags[1], f"{tags[1]}_value": 4}]
    if DRAWS.random() < 0.5:
        names = {f"C{index}": choice for index, choice in enumerate(choices)}
        return {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": names}, values
    return {"type": "object", "oneOf": choices, "discriminator": {"propertyName": "kind"}}, values


def choices_of_types():
    kinds = DRAWS.sample([({"type": "string", "maxLength": 9}, "ab"), ({"type": "null"}, None), (COUNT, 5), (FLAG, True)], 3)
    return closed({"v": {"oneOf": [kind for kind, _ in kinds]}}), [{"v": value} for _, value in kinds]


def either_is_required():
    first, second = words(2)
    schema = closed({first: TEXT, second: COUNT}, [], oneOf=[{"required": [first]}, {"required": [second]}])
    return schema, [{first: "x"}, {second: 1}]


def may_be_null():
    name = words(1)[0]
    return closed({name: {"anyOf": [COUNT, {"type": "null"}], "default": None}}, []), [{name: 3}, {name: None}, {}]


def one_needs_another():
    first, second, third = words(3)
    schema = closed({first: TEXT, second: COUNT, third: FLAG}, [], dependentRequired={first: [second]})
    return schema, [{}, {second: 1}, {first: "x", second: 1}, {first: "", second: 1, third: True}]


def old_dependencies():
    first, second = words(2)
    schema = {"type": "object", "properties": {first: TEXT, second: {"type": ["string", "integer"]}},
              "dependencies": {first: {"properties": {second: COUNT}, "required": [second]}}, "additionalProperties": False}
    return schema, [{}, {second: "x"}, {first: "a", second: 7}]


def conditions():
    tags = words(DRAWS.randint(1, 5))
    parts = [{"if": {"properties": {"tag": {"const": tag}}, "required": ["tag"]}, "then": {"required": [f"{tag}_id"]}} for tag in tags]
    schema = closed({"tag": {"enum": [*tags, "none"]}, **{f"{tag}_id": COUNT for tag in tags}}, ["tag"], allOf=parts)
    return schema, [{"tag": "none"}, {"tag": tags[0], f"{tags[0]}_id": 1}]


def else_too():
    name, other = words(2)
    schema = closed({name: FLAG, other: {"type": "integer", "minimum": 0, "maximum": 50}})
    schema |= {"if": {"properties": {name: {"const": True}}}, "then": {"properties": {other: {"minimum": 10}}},
               "else": {"properties": {other: {"maximum": 9}}}}
    return schema, [{name: True, other: 20}, {name: False, other: 3}]


def not_these():
    left_out = [*words(2), "", "zz"]
    return closed({"name": {"type": "string", "maxLength": 12, "not": {"enum": left_out}}}), [{"name": "fine"}, {"name": "zzz"}]


def not_this_type():
    return closed({"v": {"not": {"type": ["object", "array", "null"]}}}), [{"v": "x"}, {"v": 2}, {"v": False}]


def different_values():
    values = words(DRAWS.randint(2, 4))
    schema = closed({"set": {"type": "array", "items": {"enum": values}, "uniqueItems": True}})
    return schema, [{"set": []}, {"set": values}, {"set": values[::-1]}, {"set": [values[0], values[0]]}]


def different_texts():
    return closed({"set": {"type": "array", "items": TEXT, "uniqueItems": True}}), [{"set": []}]


def formats():
    name, value = DRAWS.choice([
        ("date", "2026-11-28"), ("date-time", "2026-11-28T17:00:00Z"), ("time", "17:00:00+01:00"), ("duration", "P3DT4H"),
        ("uuid", "0b1e4c6a-9f3d-4d2e-8a51-0f1e2d3c4b5a"), ("uuid4", "0b1e4c6a-9f3d-4d2e-8a51-0f1e2d3c4b5a"),
        ("ipv4", "10.0.0.1"), ("ipvanyaddress", "10.0.0.1"), ("email", "a.b@example.org"), ("uri", "https://example.org/a?b=c"),
        ("hostname", "example.org"), ("base64", "QUJD"), ("path", "/a b"), ("password", "secret"), ("byte", "QQ=="),
    ])
    return closed({"v": {"type": "string", "format": name}}), [{"v": value}]


def patterns():
    pattern, value = DRAWS.choice([
        ("^[A-Z]{2}[0-9]{3}$", "AB123"), (r"^\d{4}-\d{2}$", "2026-11"), ("^(red|green)$", "red"), ("^#[0-9a-f]{6}$", "#00ff00"),
        (r"^(?=.*\d)(?=.*[a-z])[a-z\d]{4,8}$", "abc1"), (r"^(?!\s*$).{1,9}$", "x"), ("^a+$", "aaa"), (r"^\w{1,8}$", "a_b"),
    ])
    return closed({"v": {"type": "string", "pattern": pattern}}), [{"v": value}]


def decimals():
    rest = DRAWS.choice([r"\d*\.?\d*$", r"\d*\.?\d{0,2}0*$", r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"])
    text = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*" + rest}
    return closed({"total": {"anyOf": [{"type": "number"}, text]}}), [{"total": "12.50"}, {"total": 12.5}, {"total": "-"}]


def steps():
    step, value = DRAWS.choice([(5, 15), (0.01, 1.25), (0.25, 2.75), (100, 300), (12, 24)])
    return closed({"v": {"type": "number", "multipleOf": step, "minimum": 0, "maximum": 1000}}), [{"v": value}]


def bounds():
    low = DRAWS.randint(-50, 0)
    schema = {"type": DRAWS.choice(["integer", "number"]), "exclusiveMinimum": low, "maximum": DRAWS.randint(8, 90)}
    return closed({"v": schema}), [{"v": 7}, {"v": low}]


def trees():
    node = closed({"name": {"type": "string", "maxLength": 8}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, ["name"])
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}, [{"name": "a"}, {"name": "a", "children": [{"name": "b"}]}]


def names_by_pattern():
    start = words(1)[0][:2]
    schema = {"type": "object", "properties": {"id": COUNT}, "patternProperties": {f"^{start}_[a-z]+$": FLAG, "^(one|two)$": TEXT},
              "required": ["id"], "additionalProperties": False}
    return schema, [{"id": 1}, {"id": 1, "one": "x"}, {"id": 1, f"{start}_q": True}]


def a_pattern_for_a_property():
    return {"type": "object", "properties": {"score": {"multipleOf": 5}, "tag": TEXT}, "required": ["score", "tag"],
            "patternProperties": {"^score$": COUNT}, "additionalProperties": DRAWS.choice([False, FLAG])}, [{"score": 5, "tag": "x"}]


def names_alone():
    names = words(3)
    said = DRAWS.choice([{"enum": names}, {"pattern": "^[a-z]{2,9}$"}, {"minLength": 3, "maxLength": 8}, TEXT])
    return {"type": "object", "propertyNames": said, "additionalProperties": COUNT}, [{}, {names[0]: 1}]


def how_many():
    names = sorted(words(3), key=WORDS.index)
    counts = DRAWS.choice([{"minProperties": 1}, {"minProperties": 2}, {"maxProperties": 1}, {"minProperties": 1, "maxProperties": 2}])
    return closed({name: COUNT for name in names}, [], **counts), [{names[0]: 1}, {names[0]: 1, names[2]: 2}, {}]


def mixed_enums():
    return closed({"v": {"enum": [None, True, 4, "x", [1], {"a": 1}]}}), [{"v": None}, {"v": 4}, {"v": {"a": 1}}]


def maps():
    return {"type": "object", "additionalProperties": DRAWS.choice([COUNT, TEXT, {"type": "array", "items": FLAG}])}, [{}, {"zz": 7}]


def tuples():
    return {"type": "array", "prefixItems": [TEXT, COUNT], "items": False, "minItems": 2}, [["a", 1], ["a"], ["a", 1, 2]]


def joined():
    first, second = words(2)
    return {"allOf": [{"type": "object", "properties": {first: TEXT}, "required": [first]},
                      {"type": "object", "properties": {second: COUNT}, "required": [second]}]}, [{first: "x", second: 1}]


def nothing_else():
    first, second = words(2)
    return {"type": "object", "allOf": [{"$ref": "#/$defs/base"}], "properties": {second: COUNT}, "required": [second],
            "unevaluatedProperties": False,
            "$defs": {"base": {"type": "object", "properties": {first: TEXT}}}}, [{second: 1}]


def names_of_keywords():
    names = DRAWS.sample(["default", "enum", "const", "examples", "not", "items", "type", "format"], 3)
    return closed({name: kind for name, kind in zip(names, [{"type": "string", "format": "password"}, COUNT, FLAG])}), \
        [dict(zip(names, ["x", 1, True]))]


def constants():
    return closed({"v": {"const": {"a": [1, None], "b": {"c": "d"}}}}), [{"v": {"a": [1, None], "b": {"c": "d"}}}]


def escaped_references():
    return {"type": "object", "properties": {"a/b": TEXT, "c": {"$ref": "#/properties/a~1b"}}, "required": ["c"],
            "additionalProperties": False}, [{"c": "x"}, {"a/b": "y", "c": "x"}]


def keywords_that_say_nothing():
    schema = closed({"v": {"type": "array", "items": COUNT, "contains": True, "minContains": 0, "uniqueItems": False}})
    return {**schema, "$schema": "http://json-schema.org/draft-07/schema#", "not": False, "dependentRequired": {},
            "propertyNames": {"type": "string"}}, [{"v": []}, {"v": [1, 1]}]


def lengths():
    low = DRAWS.randint(0, 3)
    return closed({"v": {"type": "string", "minLength": low, "maxLength": low + 4}}), [{"v": "a" * (low + 1)}]


FAMILIES = [
    tagged_choices, choices_of_types, either_is_required, may_be_null, one_needs_another, old_dependencies, conditions, else_too,
    not_these, not_this_type, different_values, formats, patterns, decimals, steps, bounds, trees, names_by_pattern,
    a_pattern_for_a_property, names_alone, how_many, mixed_enums, maps, tuples, joined, nothing_else, names_of_keywords, constants,
    escaped_references, keywords_that_say_nothing, lengths,
]


def changed(value):
    """`value` with one change somewhere."""
    value = copy.deepcopy(value)
    if isinstance(value, dict) and value and DRAWS.random() < 0.7:
        name = DRAWS.choice(list(value))
        if DRAWS.random() < 0.3:
            del value[name]
        else:
            value[name] = changed(value[name])
    elif isinstance(value, dict) and DRAWS.random() < 0.5:
        value["zz"] = DRAWS.choice(OTHERS)
    elif isinstance(value, list) and value and DRAWS.random() < 0.6:
        index = DRAWS.randrange(len(value))
        value[index] = changed(value[index])
    else:
        value = DRAWS.choice(OTHERS)
    return value


def is_checked(schema):
    """Whether the validator knows what the formats of `schema` mean."""
    text = json.dumps(schema)
    return '"format"' not in text or any(f'"format": "{name}"' in text for name in CHECKED)


def one(name, family):
    schema, values = family()
    draft = Draft7Validator if "dependencies" in schema else Draft202012Validator
    validator = draft({key: value for key, value in schema.items() if key != "$schema"}, format_checker=FormatChecker())
    values += [changed(DRAWS.choice(values)) for _ in range(8)] if is_checked(schema) else []
    allowed, refused = [], []
    for value in values:
        text = json.dumps(value)
        into = allowed if validator.is_valid(value) else refused
        # Pydantic forgot an end in its pattern, which so finds something in any text; it means decimals.
        is_no_decimal = family is decimals and into is allowed and any(letter.isalpha() for letter in json.dumps(value["total"]))
        if text not in into and not is_no_decimal:
            into.append(text)
    return {"name": name, "schema": schema, "allowed": allowed, "refused": refused}


def main():
    lines = [one(f"{family.__name__} {number}", family) for number in range(10) for family in FAMILIES]
    lines = lines[:296] + [one(f"different_texts {number}", different_texts) for number in range(4)]
    print("[\n" + ",\n".join("  " + json.dumps(line) for line in lines) + "\n]")


main()
