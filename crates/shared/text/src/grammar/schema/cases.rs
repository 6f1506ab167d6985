//! Rewrites conditions on the value of one property as one case per value, which avoids a product of all
//! conditions.

use serde_json::{Map, Value, json};

use super::values::{and, are_equal, constraints, has_to_be, listed, texts_in};

/// Maximum number of values in such conditions.
const MAX_VALUES: usize = 64;

/// A condition: `if` a property has a value, `then` one schema, else another.
struct Condition {
    name: String,
    values: Vec<Value>,
    /// False if the condition also holds for an object without the property.
    is_required: bool,
    then: Value,
    otherwise: Value,
}

impl Condition {
    fn of(schema: &Value) -> Option<Self> {
        let map = schema.as_object()?;
        let parts = ["if", "then", "else"];
        constraints(map).all(|(keyword, _)| parts.contains(&keyword.as_str())).then_some(())?;
        let asked = map.get("if")?.as_object()?;
        let known = ["properties", "required", "type"];
        constraints(asked).all(|(keyword, _)| known.contains(&keyword.as_str())).then_some(())?;
        let properties = asked.get("properties")?.as_object().filter(|all| all.len() == 1)?;
        let (name, value) = properties.iter().next()?;
        let value = value.as_object()?;
        constraints(value).all(|(keyword, _)| matches!(keyword.as_str(), "const" | "enum")).then_some(())?;
        let required = texts_in(asked, "required");
        required.iter().all(|one| one == name).then_some(())?;
        Some(Self {
            values: listed(value)?.into_iter().cloned().collect(),
            is_required: !required.is_empty(),
            then: map.get("then").cloned().unwrap_or(Value::Bool(true)),
            otherwise: map.get("else").cloned().unwrap_or(Value::Bool(true)),
            name: name.clone(),
        })
    }

    fn has(&self, value: &Value) -> bool {
        self.values.iter().any(|own| are_equal(own, value))
    }
}

/// Joins the conditions in `allOf` that test the value of one property.
pub(super) fn by_tag(map: &mut Map<String, Value>) {
    if !has_to_be(map, "object") {
        return;
    }
    let Some(Value::Array(all)) = map.get_mut("allOf") else { return };
    let Some(name) = all.iter().find_map(Condition::of).map(|first| first.name) else { return };
    let is_of_tag = |part: &Value| Condition::of(part).is_some_and(|one| one.name == name);
    let (conditions, others): (Vec<Value>, Vec<Value>) = std::mem::take(all).into_iter().partition(is_of_tag);
    *all = others;
    let conditions: Vec<Condition> = conditions.iter().filter_map(Condition::of).collect();
    let mut values: Vec<Value> = Vec::new();
    for value in conditions.iter().flat_map(|one| &one.values) {
        if !values.iter().any(|known| are_equal(known, value)) {
            values.push(value.clone());
        }
    }
    if values.len() > MAX_VALUES || conditions.len() < 2 {
        let left = conditions.into_iter().map(Condition::written);
        return all.extend(left);
    }
    if all.is_empty() {
        map.remove("allOf");
    }
    and(map, json!({ "anyOf": cases(&name, &values, &conditions) }));
}

impl Condition {
    fn written(self) -> Value {
        let required = if self.is_required { json!([self.name]) } else { json!([]) };
        let asked = json!({ "properties": { self.name: { "enum": self.values } }, "required": required });
        json!({ "if": asked, "then": self.then, "else": self.otherwise })
    }
}

/// Returns one case for each value, one for other values, and one for absence.
fn cases(name: &str, values: &[Value], conditions: &[Condition]) -> Vec<Value> {
    let of = |holds: &dyn Fn(&Condition) -> bool| -> Vec<Value> {
        let part = |one: &Condition| if holds(one) { one.then.clone() } else { one.otherwise.clone() };
        conditions.iter().map(part).filter(|part| *part != Value::Bool(true)).collect()
    };
    let case = |value: Value, required: &[&str], parts: Vec<Value>| json!({ "properties": { name: value }, "required": required, "allOf": parts });
    let mut cases: Vec<Value> = values
        .iter()
        .map(|value| case(json!({ "const": value }), &[name], of(&|one| one.has(value))))
        .collect();
    cases.push(case(json!({ "not": { "enum": values } }), &[name], of(&|_| false)));
    cases.push(case(Value::Bool(false), &[], of(&|one| !one.is_required)));
    cases
}
