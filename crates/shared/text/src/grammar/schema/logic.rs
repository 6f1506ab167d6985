//! Rewrites the keywords `oneOf`, `not` and `if`.

use serde_json::{Map, Value, json};

use super::{
    super::GrammarError,
    Preparation,
    cases::by_tag,
    disjoint::are_disjoint,
    negation::negated,
    values::{allows_all, and, both},
};

/// Maximum number of choices that are compared with each other.
const MAX_CHOICES: usize = 128;
/// Maximum number of cases that the library may have to join to separate choices.
const MAX_CASES: usize = 64;

impl Preparation {
    pub(super) fn logic(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        by_tag(map);
        self.condition(map);
        self.one_of(map)?;
        if let Some(other) = map.get("not").and_then(|not| negated(self.document.resolved(not))) {
            map.remove("not");
            if !allows_all(&other) {
                and(map, other);
            }
        }
        Ok(())
    }

    /// Rewrites `if` as two choices: one in which the condition holds, and one in which it does not.
    fn condition(&self, map: &mut Map<String, Value>) {
        let says_nothing = |map: &Map<String, Value>, keyword: &str| map.get(keyword).is_none_or(allows_all);
        if !map.contains_key("if") || (says_nothing(map, "then") && says_nothing(map, "else")) {
            for keyword in ["if", "then", "else"] {
                map.remove(keyword);
            }
            return;
        }
        let condition = self.document.resolved(&map["if"]).clone();
        let Some(other) = negated(&condition) else { return };
        let mut part = |keyword: &str| map.remove(keyword).unwrap_or(Value::Bool(true));
        part("if");
        let (then, otherwise) = (part("then"), part("else"));
        let cases = [both(condition, then), both(other, otherwise)];
        let cases: Vec<Value> = cases.into_iter().filter(|case| !is_never(case)).collect();
        and(map, json!({ "anyOf": cases }));
    }

    /// Rewrites `oneOf` as `anyOf` with pairwise disjoint choices.
    fn one_of(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        let Some(Value::Array(choices)) = map.remove("oneOf") else { return Ok(()) };
        let typed: Vec<Value> = choices.iter().map(|choice| self.of_type(choice, map.get("type"))).collect();
        let choices = if self.exclude_each_other(&typed) {
            choices
        } else if let Some(apart) = self.kept_apart(&choices, &typed) {
            apart
        } else {
            let message = "a value may match several choices; use 'anyOf', or give each choice a \
                           property with its own 'const'";
            self.cannot_hold("oneOf", message)?;
            choices
        };
        if map.contains_key("anyOf") {
            and(map, json!({ "anyOf": choices }));
        } else {
            map.insert("anyOf".to_owned(), choices.into());
        }
        Ok(())
    }

    /// Adds the type of the surrounding schema to a choice.
    fn of_type(&self, choice: &Value, kind: Option<&Value>) -> Value {
        let mut choice = self.document.resolved(choice).clone();
        if let (Value::Object(map), Some(kind)) = (&mut choice, kind) {
            map.entry("type").or_insert_with(|| kind.clone());
        }
        choice
    }

    fn exclude_each_other(&self, choices: &[Value]) -> bool {
        let others = |index: usize| choices.iter().skip(index + 1);
        choices.len() <= MAX_CHOICES
            && choices
                .iter()
                .enumerate()
                .all(|(index, choice)| others(index).all(|other| are_disjoint(choice, other, &self.document)))
    }

    /// Excludes from each choice the choices that it may overlap.
    fn kept_apart(&self, choices: &[Value], typed: &[Value]) -> Option<Vec<Value>> {
        if choices.len() > MAX_CASES {
            return None;
        }
        let apart = |(index, choice): (usize, &Value)| {
            let meets =
                |other: usize| other != index && !are_disjoint(&typed[index], &typed[other], &self.document);
            let mut parts = vec![choice.clone()];
            for other in (0..choices.len()).filter(|other| meets(*other)) {
                parts.push(negated(self.document.resolved(&choices[other]))?);
            }
            let apart = json!({ "allOf": parts });
            (cases(&apart) <= MAX_CASES).then_some(apart)
        };
        choices.iter().enumerate().map(apart).collect()
    }
}

fn is_never(schema: &Value) -> bool {
    let parts = schema.get("allOf").and_then(Value::as_array);
    *schema == Value::Bool(false) || parts.into_iter().flatten().any(is_never)
}

/// Counts the cases that the choices in `schema` produce together.
fn cases(schema: &Value) -> usize {
    let list = |keyword: &str| schema.get(keyword).and_then(Value::as_array).into_iter().flatten().map(cases);
    let choices: usize = list("anyOf").sum();
    list("allOf").fold(choices.max(1), usize::saturating_mul)
}
