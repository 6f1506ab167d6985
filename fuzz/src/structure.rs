//! Target for schemas, expressions and grammars that are changed part by part, so that they stay valid.
//!
//! The input is a kind (`json`, `regex`, `lark`), a number, a line end, and then a text of the kind. The
//! number seeds the changes and the tokens of the answers. Compilation must stay within the limits of the
//! compiler process. A completed answer must conform to the constraint, judged by `validator` or another
//! regular expression engine.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value, json};
use text::{
    grammar::{Enforcement, Grammar, Matcher},
    sandbox::CPU_MS,
};

use crate::{
    Outcome,
    forms::{END, grammars},
    mutate::Random,
    targets::refused,
    validator::{finds, keeps_to},
};

const CHANGES: usize = 4;
/// Maximum answer length in bytes, each of which is a token.
const STEPS: usize = 160;
const ANSWERS: usize = 3;
/// Factor on the compiler process's time limit: where tests run, only the library is optimized and other
/// tests compete for the CPU.
const SLOWER: u64 = 8;

pub(crate) fn structure(input: &[u8]) -> Outcome {
    let text = std::str::from_utf8(input).map_err(refused)?;
    let (first, text) = text.split_once('\n').ok_or("there is no kind")?;
    let (kind, number) = first.split_once(' ').ok_or("there is no number")?;
    let mut random =
        Random::new(number.bytes().fold(0, |sum: u64, byte| sum.rotate_left(8) ^ u64::from(byte)));
    match kind {
        "json" => {
            let mut schema = model_files::strict_json::parse(text.as_bytes()).map_err(refused)?;
            for _ in 0..random.below(CHANGES + 1) {
                change(&mut schema, &mut random);
            }
            of_schema(&schema, &mut random)
        }
        "regex" => {
            let expression = changed_expression(text, &mut random);
            of_text(&Grammar::Regex(expression.clone()), &mut random, |answer| {
                finds(&format!("^(?:{expression})$"), answer)
            })
        }
        "lark" => of_text(&Grammar::Lark(changed_lark(text, &mut random)), &mut random, |_| None),
        other => Err(format!("there is no kind {other}")),
    }
}

/// Compiles a schema in both modes; answers conform to what the strict mode accepts.
fn of_schema(schema: &Value, random: &mut Random) -> Outcome {
    let grammar = Grammar::Json(schema.clone());
    let strict = grammar.source_behind(None, Enforcement::Strict);
    let held = grammar.source_behind(None, Enforcement::BestEffort);
    if let Ok(strict) = &strict {
        assert_eq!(held.as_ref(), Ok(strict), "a schema that is taken in full has one form");
        assert!(strict.warnings.is_empty());
    }
    let held = held.map_err(refused)?;
    assert!(strict.is_ok() || !held.warnings.is_empty(), "the strict mode refuses what has no warning");
    let matcher = compiled(&held.text)?;
    for _ in 0..ANSWERS {
        let Some(answer) = answer(&mut matcher.deep_clone(), random)? else { continue };
        let value: Value = match serde_json::from_slice(&answer) {
            Ok(value) => value,
            // JSON allows the number, but this parser cannot represent it.
            Err(error) if error.to_string().contains("number out of range") => continue,
            Err(error) => panic!("{}: {error}", String::from_utf8_lossy(&answer)),
        };
        if strict.is_ok() {
            assert_ne!(keeps_to(schema, &value), Some(false), "{schema}\n{value}");
        }
    }
    Ok(())
}

fn of_text(grammar: &Grammar, random: &mut Random, keeps: impl Fn(&str) -> Option<bool>) -> Outcome {
    let source = grammar.source().map_err(refused)?;
    let matcher = compiled(&source)?;
    for _ in 0..ANSWERS {
        let Some(answer) = answer(&mut matcher.deep_clone(), random)? else { continue };
        if let Ok(answer) = std::str::from_utf8(&answer) {
            assert_ne!(keeps(answer), Some(false), "{grammar:?}\n{answer:?}");
        }
        let mut again = matcher.deep_clone();
        assert!(answer.iter().all(|&byte| again.accept(byte.into()).is_ok()), "an answer is taken again");
        assert!(again.may_end());
    }
    Ok(())
}

fn compiled(source: &str) -> Result<Matcher, String> {
    let started = computed();
    let matcher = grammars().compile(source).map_err(refused);
    let took = computed().saturating_sub(started);
    assert!(took < Duration::from_millis(SLOWER * CPU_MS), "{took:?} to compile {source:.2000}");
    matcher
}

/// Returns the CPU time of this process, since a grammar is compiled in another thread.
fn computed() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

/// Generates an answer of allowed tokens and prefers tokens that close something; `None` if the answer does
/// not end in time or a step would take too long.
fn answer(matcher: &mut Matcher, random: &mut Random) -> Result<Option<Vec<u8>>, String> {
    let mut said = Vec::new();
    for _ in 0..STEPS {
        let allowed = matcher.allowed().map_err(refused)?;
        let may_end = allowed.contains(END);
        assert_eq!(matcher.may_end(), may_end);
        let bytes: Vec<u8> = (0..=u8::MAX).filter(|&byte| allowed.contains(byte.into())).collect();
        if may_end && (bytes.is_empty() || random.below(3) == 0) {
            return Ok(Some(said));
        }
        assert!(!bytes.is_empty(), "nothing may follow {:?}", String::from_utf8_lossy(&said));
        let closing =
            bytes.iter().copied().find(|byte| b"\"}],:".contains(byte)).filter(|_| random.below(3) != 0);
        let byte = closing.unwrap_or_else(|| bytes[random.below(bytes.len())]);
        matcher.accept(byte.into()).map_err(refused)?;
        said.push(byte);
    }
    Ok(None)
}

fn change(schema: &mut Value, random: &mut Random) {
    let (mut count, at) = (0, random.below(places(schema)));
    let mut done = false;
    visit(schema, &mut |place| {
        if count == at && !done {
            replace(place, random);
            done = true;
        }
        count += 1;
    });
}

fn places(schema: &mut Value) -> usize {
    let mut count = 0;
    visit(schema, &mut |_| count += 1);
    count
}

/// Calls `show` for `schema` and all its subschemas.
fn visit(schema: &mut Value, show: &mut impl FnMut(&mut Value)) {
    show(schema);
    let Value::Object(map) = schema else { return };
    for (keyword, value) in map.iter_mut() {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties" | "$defs", Value::Object(named)) => {
                named.values_mut().for_each(|inner| visit(inner, show));
            }
            ("allOf" | "anyOf" | "oneOf" | "prefixItems", Value::Array(list)) => {
                list.iter_mut().for_each(|inner| visit(inner, show));
            }
            ("items" | "additionalProperties" | "not" | "if" | "then" | "else" | "propertyNames", inner) => {
                visit(inner, show);
            }
            _ => {}
        }
    }
}

fn replace(place: &mut Value, random: &mut Random) {
    let old = place.take();
    *place = match random.below(8) {
        0 => json!({ "anyOf": [old, small(random)] }),
        1 => json!({ "allOf": [old, small(random)] }),
        2 => json!({ "oneOf": [small(random), old] }),
        3 => json!({ "if": small(random), "then": old, "else": small(random) }),
        4 => {
            json!({ "type": "object", "properties": { "a": old, "b": small(random) }, "required": ["a"], "additionalProperties": small(random) })
        }
        5 => json!({ "type": "array", "items": old, "maxItems": random.below(4) }),
        6 => small(random),
        _ => with_keyword(old, random),
    };
}

/// Returns `schema` with additional keywords, or without one keyword.
fn with_keyword(schema: Value, random: &mut Random) -> Value {
    let (Value::Object(mut map), Value::Object(more)) = (schema, small(random)) else { return json!(true) };
    if random.below(3) == 0 && !map.is_empty() {
        let name = map.keys().nth(random.below(map.len())).cloned().unwrap_or_default();
        map.remove(&name);
    } else {
        map.extend(more);
    }
    Value::Object(map)
}

fn small(random: &mut Random) -> Value {
    let mut map = Map::new();
    for _ in 0..=random.below(2) {
        let number = [-3, 0, 1, 2, 7, 19, 100, i64::MAX][random.below(8)];
        let names = [json!([]), json!(["a"]), json!(["a", "b"])][random.below(3)].clone();
        let pattern = ["^a", "b$", "^(a|b)$", "^[0-9]{2,3}$", "", "^(?=.*[0-9])[a-c0-9]{1,4}$", "\\w+"]
            [random.below(7)];
        let kind = ["null", "boolean", "integer", "number", "string", "array", "object"][random.below(7)];
        let values = [
            json!([1, "a", null]),
            json!(["a", "ab", ""]),
            json!([0.5, 1.0, [1]]),
            json!([{ "a": 1 }, true]),
        ];
        let values = values[random.below(4)].clone();
        let count = random.below(5);
        let (keyword, value) = match random.below(22) {
            0..=3 => ("type", json!(kind)),
            4 => ("enum", values),
            5 => ("const", values[random.below(2)].clone()),
            6 => ("minimum", json!(number)),
            7 => ("exclusiveMaximum", json!(number as f64 + 0.5)),
            8 => ("multipleOf", json!([1.0, 5.0, 0.01, 0.25, 997.0, 1e-7][random.below(6)])),
            9 => ("minLength", json!(count)),
            10 => ("maxLength", json!(count)),
            11 => ("pattern", json!(pattern)),
            12 => ("required", names),
            13 => ("properties", json!({ "a": { "type": kind }, "b": { "enum": values } })),
            14 => ("patternProperties", json!({ pattern: { "type": kind } })),
            15 => ("additionalProperties", json!({ "type": kind })),
            16 => ("propertyNames", json!({ "pattern": pattern })),
            17 => ("dependentRequired", json!({ "a": names })),
            18 => ("minProperties", json!(count)),
            19 => ("maxProperties", json!(count)),
            20 => ("uniqueItems", json!(true)),
            _ => ("not", json!({ "enum": values })),
        };
        map.insert(keyword.to_owned(), value);
    }
    Value::Object(map)
}

/// Returns `expression` repeated, joined with others, or both.
fn changed_expression(expression: &str, random: &mut Random) -> String {
    const OTHERS: [&str; 8] = ["a", "[^b]", r"\d", r"\w{2}", "(?:ab)*", "", "[a-zé]", "(?i:k)"];
    let mut all = expression.to_owned();
    for _ in 0..random.below(CHANGES + 1) {
        let other = OTHERS[random.below(OTHERS.len())];
        all = match random.below(6) {
            0 => format!("(?:{all})|{other}"),
            1 => format!("(?:{all}){other}"),
            2 => format!("{other}(?:{all})"),
            3 => format!("(?:{all}){{{},{}}}", random.below(3), 3 + random.below(40)),
            4 => format!("(?:{all})*"),
            _ => format!("(?:{all})?"),
        };
    }
    all
}

/// Returns `grammar` with rules added around its start.
fn changed_lark(grammar: &str, random: &mut Random) -> String {
    const OTHERS: [&str; 5] = [
        "\"x\"",
        "/[0-9]{1,4}/",
        "%json {\"type\":\"number\"}",
        "%json {\"enum\":[1,\"a\"]}",
        "(\"y\" | \"\")",
    ];
    let mut all = grammar.to_owned();
    for round in 0..random.below(CHANGES + 1) {
        let (inner, other) = (format!("r{round}"), OTHERS[random.below(OTHERS.len())]);
        all = all.replacen("start:", &format!("{inner}:"), 1);
        let start = match random.below(4) {
            0 => format!("({inner} | o{round})"),
            1 => format!("{inner} o{round}"),
            2 => format!("o{round} {inner}{{0,3}}"),
            _ => format!("\"(\" {inner}? \")\""),
        };
        all = format!("start: {start}\no{round}: {other}\n{all}");
    }
    all
}
