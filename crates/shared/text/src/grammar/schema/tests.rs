use super::*;

fn best_effort(schema: &Value) -> (Value, Vec<Warning>) {
    let (mut schema, warnings) = prepared(schema, Enforcement::BestEffort).unwrap();
    schema.as_object_mut().unwrap().remove(LIBRARY_OPTIONS);
    (schema, warnings)
}

fn strict(schema: &Value) -> Result<Value, GrammarError> {
    let (mut schema, warnings) = prepared(schema, Enforcement::Strict)?;
    assert_eq!(warnings, []);
    schema.as_object_mut().unwrap().remove(LIBRARY_OPTIONS);
    Ok(schema)
}

#[test]
fn what_anything_keeps_to_is_taken_away_and_nothing_else() {
    let kept = json!({ "type": "object", "properties": { "a": { "type": "string" } } });
    for nothing in [
        json!({ "propertyNames": { "type": "string" } }),
        json!({ "propertyNames": {} }),
        json!({ "propertyNames": true }),
        json!({ "propertyNames": { "type": "string", "minLength": 0 } }),
        json!({ "contains": {}, "minContains": 0 }),
        json!({ "not": false }),
        json!({ "if": true }),
        json!({ "if": { "required": ["b"] } }),
        json!({ "then": { "required": ["b"] } }),
        json!({ "dependentRequired": {} }),
        json!({ "dependentSchemas": {} }),
        json!({ "dependencies": {} }),
        json!({ "unevaluatedProperties": true }),
        json!({ "uniqueItems": true, "format": "colour" }),
        json!({ "$schema": "http://json-schema.org/draft-04/schema#" }),
    ] {
        let mut schema = kept.clone();
        schema.as_object_mut().unwrap().extend(nothing.as_object().unwrap().clone());
        assert_eq!(strict(&schema), Ok(kept.clone()), "{nothing}");
    }
    let texts = json!({ "properties": { "a": { "type": "string", "format": "password" }, "b": { "const": { "format": "path" } } } });
    let expected =
        json!({ "properties": { "a": { "type": "string" }, "b": { "const": { "format": "path" } } } });
    assert_eq!(strict(&texts), Ok(expected));
}

#[test]
fn the_name_of_a_property_changes_nothing() {
    for name in ["other", "default", "enum", "const", "examples", "not", "$ref", "x-guidance"] {
        let within = |schema: Value| {
            [
                json!({ "properties": { name: schema } }),
                json!({ "$defs": { name: schema } }),
                json!({ "definitions": { name: schema } }),
                json!({ "patternProperties": { format!("^{}_", name.replace('$', r"\$")): schema } }),
            ]
        };
        for schema in within(json!({ "type": "string", "format": "password" })) {
            let prepared = strict(&schema).unwrap().to_string();
            assert!(!prepared.contains("password"), "{prepared}");
        }
        for schema in within(json!({ "type": "integer", "multipleOf": 99_999_989 })) {
            let error = strict(&schema).unwrap_err().to_string();
            assert!(error.contains("multipleOf"), "{error}");
        }
        for schema in within(json!({ "type": "integer", "minimum": i64::MIN })) {
            let prepared = strict(&schema).unwrap().to_string();
            assert!(!prepared.contains(&i64::MIN.to_string()), "{prepared}");
        }
    }
}

#[test]
fn data_is_no_schema() {
    let schema = json!({
        "default": { "multipleOf": 1e7 },
        "enum": [{ "format": "colour" }],
        "examples": [{ "not": {} }],
        "const": { "properties": { "a": { "format": "colour" } } },
    });
    assert_eq!(strict(&schema), Ok(schema));
}

#[test]
fn steps_are_bounded_alone_and_together() {
    let step = |step: f64| json!({ "type": "number", "multipleOf": step });
    for taken in [step(1.0), step(0.01), step(0.25), step(1_000.0)] {
        assert!(strict(&taken).is_ok(), "{taken}");
    }
    for refused in [
        step(9_973.0),
        step(0.07),
        step(1e-9),
        json!({ "type": "integer", "allOf": [{ "multipleOf": 97 }, { "multipleOf": 89 }] }),
        json!({ "properties": { "a": step(1_001.0), "b": step(1_002.0) } }),
    ] {
        let error = strict(&refused).unwrap_err().to_string();
        assert!(error.contains("'multipleOf' at") && error.contains("enum"), "{refused}: {error}");
    }
    assert_eq!(strict(&step(0.0)), Err(GrammarError::NoStep));
}

#[test]
fn whole_numbers_end_and_have_bounds_that_the_library_takes() {
    let prepared = strict(&json!({ "type": "integer", "minimum": i64::MIN, "uniqueItems": false })).unwrap();
    assert_eq!(prepared["minimum"], numbers::MIN_BOUND);
    assert_eq!(prepared["maximum"], numbers::MAX_BOUND);
    let prepared = strict(&json!({ "type": ["integer", "null"], "exclusiveMinimum": 3 })).unwrap();
    assert_eq!((prepared.get("minimum"), &prepared["exclusiveMinimum"]), (None, &json!(3)));
    let too_high = strict(&json!({ "type": "number", "minimum": 1e30 })).unwrap_err().to_string();
    assert!(too_high.contains("minimum"), "{too_high}");
}

#[test]
fn what_cannot_be_held_is_refused_or_dropped_with_its_place() {
    let inner = json!({ "type": "array", "contains": { "const": 1 } });
    let schema = json!({ "properties": { "a/b": inner } });
    let warning = Warning {
        path: "/properties/a~1b".into(),
        keyword: "contains".into(),
        message: "leave it out, or say 'items' or 'prefixItems'".into(),
    };
    assert_eq!(strict(&schema), Err(GrammarError::Keyword(warning.clone())));
    let dropped = json!({ "properties": { "a/b": { "type": "array" } } });
    assert_eq!(best_effort(&schema), (dropped, vec![warning]));
    for (schema, keyword) in [
        (json!({ "type": "string", "format": "colour" }), "format"),
        (json!({ "type": "string", "pattern": "^(?!abc).*$" }), "pattern"),
        (json!({ "type": "array", "uniqueItems": true }), "uniqueItems"),
        (json!({ "oneOf": [{ "type": "integer" }, { "type": "number" }] }), "oneOf"),
        (json!({ "not": { "type": "integer" } }), "not"),
        (json!({ "if": { "pattern": "a" }, "then": { "maxLength": 3 } }), "if"),
        (json!({ "patternProperties": { "^a": {}, "b$": {} } }), "patternProperties"),
        (json!({ "propertyNames": { "pattern": "^a", "maxLength": 3 } }), "propertyNames"),
        (json!({ "minProperties": 2, "properties": { "a": true, "b": true } }), "minProperties"),
        (json!({ "$dynamicRef": "#node" }), "$dynamicRef"),
    ] {
        let error = strict(&schema).unwrap_err().to_string();
        assert!(error.contains(&format!("'{keyword}' at the root")), "{schema}: {error}");
        assert_eq!(best_effort(&schema).1[0].keyword, keyword, "{schema}");
    }
}

#[test]
fn free_names_are_counted_once() {
    let open = |least: usize| json!({ "type": "object", "properties": { "x": true, "a": true }, "required": ["x"], "minProperties": least });
    assert!(strict(&open(2)).is_ok());
    assert!(strict(&open(3)).unwrap_err().to_string().contains("'minProperties' at the root"));
    let warnings = best_effort(&open(3)).1;
    assert_eq!((warnings.len(), warnings[0].keyword.as_str()), (1, "minProperties"));
    let closed = json!({ "type": "object", "properties": { "x": true, "a": true, "b": true }, "minProperties": 2, "additionalProperties": false });
    assert!(strict(&closed).is_ok());
}

#[test]
fn rewrites_say_the_same() {
    for (schema, same) in [
        (
            json!({ "oneOf": [{ "type": "string" }, { "type": "null" }] }),
            json!({ "anyOf": [{ "type": "string" }, { "type": "null" }] }),
        ),
        (
            json!({ "type": "object", "required": ["a"], "dependentRequired": { "a": ["b"] } }),
            json!({ "type": "object", "required": ["a"], "allOf": [{ "required": ["b"] }] }),
        ),
        (
            json!({ "type": "object", "propertyNames": { "enum": ["a"] }, "additionalProperties": { "type": "null" } }),
            json!({ "type": "object", "additionalProperties": false, "properties": { "a": { "type": "null" } } }),
        ),
        (
            json!({ "type": "object", "propertyNames": { "pattern": "^a" } }),
            json!({ "type": "object", "additionalProperties": false, "patternProperties": { "^a": true } }),
        ),
        (
            json!({ "type": "array", "items": { "type": "boolean" }, "uniqueItems": true, "minItems": 2 }),
            json!({ "type": "array", "enum": [[false, true], [true, false]] }),
        ),
        (
            json!({ "not": { "type": ["object", "array"] } }),
            json!({ "allOf": [{ "type": ["null", "boolean", "number", "string"] }] }),
        ),
        (
            json!({ "type": "object", "properties": { "a": true }, "unevaluatedProperties": false }),
            json!({ "type": "object", "properties": { "a": true }, "additionalProperties": false }),
        ),
        (
            json!({ "properties": { "a": { "$ref": "#/properties/b~0" }, "b~": { "type": "null" } } }),
            json!({ "properties": { "a": { "$ref": "#/$defs/hoisted-0" }, "b~": { "type": "null" } }, "$defs": { "hoisted-0": { "type": "null" } } }),
        ),
        (json!({ "$recursiveRef": "#", "type": "null" }), json!({ "type": "null", "$ref": "#" })),
    ] {
        let prepared = prepared(&schema, Enforcement::Strict).map(|(mut schema, _)| {
            schema.as_object_mut().unwrap().remove(LIBRARY_OPTIONS);
            schema
        });
        match prepared {
            Ok(prepared) => assert_eq!(prepared, same, "{schema}"),
            Err(error) => {
                assert_eq!((error, same.get("$ref").is_some()), (GrammarError::Endless, true), "{schema}")
            }
        }
    }
}

#[test]
fn values_without_an_end_are_refused_or_left_out() {
    let node = |required: Value| {
        json!({
            "$ref": "#/$defs/node",
            "$defs": { "node": { "type": "object", "properties": { "next": { "$ref": "#/$defs/node" } }, "required": required } },
        })
    };
    assert!(strict(&node(json!([]))).is_ok());
    assert_eq!(strict(&node(json!(["next"]))), Err(GrammarError::Endless));
    let list = json!({ "type": "array", "items": node(json!(["next"]))["$defs"]["node"], "$defs": node(json!(["next"]))["$defs"] });
    assert_eq!(strict(&list).unwrap()["items"], false);
}
