//! Rewrites object keywords that the library supports partly or not at all.

use serde_json::{Map, Value, json};

use super::{
    super::GrammarError,
    Preparation, patterns,
    properties::MAX_COUNTED,
    values::{allows_all, and, and_one_of, constraints, count_in, listed, may_be, texts_in},
};

/// Maximum number of conditions, since each doubles the cases of an object.
const MAX_CONDITIONS: usize = 6;

/// Keywords whose subschemas may evaluate properties.
const ELSEWHERE: [&str; 6] = ["anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies"];

impl Preparation {
    pub(super) fn objects(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        if !may_be(map, "object") {
            for keyword in [
                "propertyNames",
                "dependentRequired",
                "dependentSchemas",
                "dependencies",
                "unevaluatedProperties",
                "patternProperties",
            ] {
                map.remove(keyword);
            }
            return Ok(());
        }
        self.unevaluated_properties(map);
        self.property_names(map)?;
        self.dependencies(map)?;
        self.pattern_properties(map)?;
        self.counts(map)
    }

    /// Rewrites `unevaluatedProperties` if the evaluated names are known.
    fn unevaluated_properties(&self, map: &mut Map<String, Value>) {
        let Some(schema) = map.get("unevaluatedProperties").cloned() else { return };
        if allows_all(&schema) || map.contains_key("additionalProperties") {
            map.remove("unevaluatedProperties");
            return;
        }
        let mut names = Vec::new();
        if self.evaluated(&Value::Object(map.clone()), &mut names).is_none() {
            return;
        }
        map.remove("unevaluatedProperties");
        let properties = map.entry("properties").or_insert_with(|| json!({}));
        if let Value::Object(properties) = properties {
            for name in names {
                properties.entry(name).or_insert(Value::Bool(true));
            }
        }
        map.insert("additionalProperties".to_owned(), schema);
    }

    /// Adds the names that `schema` evaluates for every object; `None` if the set depends on the object.
    fn evaluated(&self, schema: &Value, names: &mut Vec<String>) -> Option<()> {
        let Value::Object(map) = schema else { return Some(()) };
        if ELSEWHERE.iter().chain(&["patternProperties"]).any(|keyword| map.contains_key(*keyword)) {
            return None;
        }
        let properties = map.get("properties").and_then(Value::as_object);
        names.extend(properties.into_iter().flat_map(Map::keys).cloned());
        if map.contains_key("$ref") {
            let only = json!({ "$ref": map["$ref"] });
            let target = self.document.resolved(&only).as_object().filter(|to| !to.contains_key("$ref"))?;
            self.no_others(target)?;
            self.evaluated(&Value::Object(target.clone()), names)?;
        }
        for part in map.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            let part = self.document.resolved(part);
            self.no_others(part.as_object()?)?;
            self.evaluated(part, names)?;
        }
        Some(())
    }

    /// Returns `None` for a schema that evaluates properties other than by name.
    #[expect(clippy::unused_self, reason = "a step of `evaluated`")]
    fn no_others(&self, map: &Map<String, Value>) -> Option<()> {
        let looks = map.contains_key("additionalProperties") || map.contains_key("unevaluatedProperties");
        (!looks).then_some(())
    }

    /// Rewrites `propertyNames` as a list of names or one pattern.
    fn property_names(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        let Some(names) = map.get("propertyNames").cloned() else { return Ok(()) };
        let names = self.document.resolved(&names).clone();
        let no_map = Map::new();
        let said = names.as_object().unwrap_or(&no_map);
        let says_nothing = |keyword: &str, value: &Value| match keyword {
            "type" => value == "string",
            "minLength" => value == 0,
            _ => false,
        };
        let said: Vec<(&String, &Value)> =
            constraints(said).filter(|(keyword, value)| !says_nothing(keyword, value)).collect();
        if said.is_empty() && names != Value::Bool(false) {
            map.remove("propertyNames");
            return Ok(());
        }
        if map.contains_key("patternProperties") {
            return Ok(());
        }
        let listed = names.as_object().and_then(listed).filter(|_| said.len() == 1);
        let only = |keyword: &str| said.iter().find(|(one, _)| *one == keyword).map(|(_, value)| *value);
        let is_of_lengths =
            said.iter().all(|(keyword, _)| matches!(keyword.as_str(), "minLength" | "maxLength"));
        if let Some(listed) = listed.or_else(|| (names == Value::Bool(false)).then(Vec::new)) {
            let allowed: Vec<&str> = listed.into_iter().filter_map(Value::as_str).collect();
            only_names(map, &allowed);
        } else if let Some(Value::String(pattern)) = only("pattern").filter(|_| said.len() == 1) {
            only_pattern(map, pattern);
        } else if is_of_lengths {
            let length =
                |keyword| only(keyword).and_then(Value::as_u64).and_then(|it| usize::try_from(it).ok());
            only_pattern(map, &patterns::of_length(length("minLength").unwrap_or(0), length("maxLength")));
        }
        Ok(())
    }

    /// Rewrites dependencies of a property as two choices: without the property, or with its dependencies.
    fn dependencies(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        let mut all = Vec::new();
        for keyword in ["dependentRequired", "dependentSchemas", "dependencies"] {
            if let Some(Value::Object(named)) = map.get(keyword) {
                all.extend(named.iter().map(|(name, then)| (name.clone(), then.clone())));
            }
        }
        let required: Vec<String> = texts_in(map, "required").into_iter().map(str::to_owned).collect();
        let mut cases = Vec::new();
        for (name, then) in all {
            let then = match then {
                Value::Array(names) if names.iter().all(|one| required.iter().any(|known| one == known)) => {
                    continue;
                }
                Value::Array(names) => json!({ "required": names }),
                schema if allows_all(&schema) => continue,
                schema => schema,
            };
            cases.push(if required.contains(&name) {
                then
            } else {
                json!({ "anyOf": [
                    { "properties": { name.as_str(): false } },
                    { "required": [name], "allOf": [then] },
                ] })
            });
        }
        let conditions = cases.iter().filter(|case| case.get("anyOf").is_some()).count();
        if conditions <= MAX_CONDITIONS {
            for keyword in ["dependentRequired", "dependentSchemas", "dependencies"] {
                map.remove(keyword);
            }
            cases.into_iter().for_each(|case| and(map, case));
        } else if map.contains_key("dependencies") {
            let message = format!(
                "the limit is {MAX_CONDITIONS} conditions; write 'anyOf' with one choice for each case"
            );
            self.drop_keyword(map, "dependencies", message)?;
        }
        Ok(())
    }

    /// Rewrites the bounds on the number of properties if some are optional.
    fn counts(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        let mut counts = Counts::of(map);
        if counts.least <= counts.required.len() {
            map.remove("minProperties");
        } else if counts.needs_free_names() {
            let message = "undeclared properties may repeat, so they cannot be counted; list properties \
                           as 'required', or use 1";
            self.cannot_hold("minProperties", message)?;
            // The library supports a minimum of one more than the number of required properties.
            map.insert("minProperties".to_owned(), (counts.required.len() + 1).into());
            counts = Counts::of(map);
        }
        if counts.is_closed && counts.most.is_some_and(|most| most >= counts.names()) {
            map.remove("maxProperties");
        }
        let says_it = map.contains_key("minProperties") || map.contains_key("maxProperties");
        if !says_it || counts.optional.is_empty() || counts.is_known() {
            return Ok(());
        }
        let Some(cases) = counts.cases() else {
            for keyword in ["minProperties", "maxProperties"] {
                if map.contains_key(keyword) {
                    let message = "too many optional properties to count; list them as 'required'";
                    self.drop_keyword(map, keyword, message)?;
                }
            }
            return Ok(());
        };
        map.remove("minProperties");
        map.remove("maxProperties");
        and_one_of(map, "object", cases);
        Ok(())
    }
}

/// Bounds on the number of properties, and the declared properties.
struct Counts {
    required: Vec<String>,
    optional: Vec<String>,
    least: usize,
    most: Option<usize>,
    /// Whether the schema allows only properties with declared names.
    is_closed: bool,
}

impl Counts {
    /// Maximum number of optional properties that each may be the first.
    const MAX_FIRST: usize = 64;

    fn of(map: &Map<String, Value>) -> Self {
        let required: Vec<String> = texts_in(map, "required").into_iter().map(str::to_owned).collect();
        let properties = map.get("properties").and_then(Value::as_object);
        let is_optional =
            |(name, schema): &(&String, &Value)| !required.contains(name) && **schema != Value::Bool(false);
        let optional = properties.into_iter().flatten().filter(is_optional).map(|(name, _)| name.clone());
        let has_patterns =
            map.get("patternProperties").and_then(Value::as_object).is_some_and(|all| !all.is_empty());
        Self {
            optional: optional.collect(),
            least: count_in(map, "minProperties").unwrap_or(0),
            most: count_in(map, "maxProperties"),
            is_closed: map.get("additionalProperties") == Some(&Value::Bool(false)) && !has_patterns,
            required,
        }
    }

    fn names(&self) -> usize {
        self.required.len() + self.optional.len()
    }

    /// Whether more than one undeclared property may be needed, which the library cannot keep distinct.
    fn needs_free_names(&self) -> bool {
        !self.is_closed && self.least > self.required.len() + 1
    }

    /// Whether the library can count the properties itself.
    fn is_known(&self) -> bool {
        let beside = |count: usize| count.saturating_sub(self.required.len());
        self.is_closed && beside(self.least) <= 1 && self.most.is_none_or(|most| beside(most) == 1)
    }

    /// Returns objects with valid counts, case by case: each without optional parts, or with one mandatory
    /// property.
    fn cases(&self) -> Option<Vec<Value>> {
        let missing = self.least.saturating_sub(self.required.len());
        if self.most.is_none() && missing == 1 && self.optional.len() <= Self::MAX_FIRST {
            return Some(self.first_of());
        }
        if self.optional.len() > MAX_COUNTED {
            return None;
        }
        let chosen = |choice: u32| (0..self.optional.len()).filter(move |index| choice >> index & 1 == 1);
        let cases = (0..1_u32 << self.optional.len()).filter_map(|choice| {
            let count = self.required.len() + chosen(choice).count();
            let fits = self.most.is_none_or(|most| count <= most) && (!self.is_closed || count >= self.least);
            fits.then(|| self.case(&chosen(choice).collect::<Vec<_>>()))
        });
        Some(cases.collect())
    }

    fn case(&self, chosen: &[usize]) -> Value {
        let mut case = json!({ "type": "object", "minProperties": self.least });
        if let Some(most) = self.most {
            case["maxProperties"] = most.into();
        }
        let chosen_names = chosen.iter().map(|index| &self.optional[*index]);
        let names: Vec<&String> = self.required.iter().chain(chosen_names).collect();
        case["properties"] = self.without(|index| !chosen.contains(&index));
        case["required"] = json!(names);
        case
    }

    /// Returns a case for each optional property as the first present one, and one for an undeclared name.
    fn first_of(&self) -> Vec<Value> {
        let mut cases: Vec<Value> = (0..self.optional.len())
            .map(|first| {
                let (without, required) = (self.without(|index| index < first), &self.optional[first]);
                json!({ "type": "object", "properties": without, "required": [required] })
            })
            .collect();
        if !self.is_closed {
            cases.push(self.case(&[]));
        }
        cases
    }

    fn without(&self, is_left_out: impl Fn(usize) -> bool) -> Value {
        let names = self.optional.iter().enumerate().filter(|(index, _)| is_left_out(*index));
        names.map(|(_, name)| (name.clone(), Value::Bool(false))).collect::<Map<_, _>>().into()
    }
}

/// Allows only properties with these names.
fn only_names(map: &mut Map<String, Value>, allowed: &[&str]) {
    map.remove("propertyNames");
    let others =
        map.insert("additionalProperties".to_owned(), Value::Bool(false)).unwrap_or(Value::Bool(true));
    let mut properties = match map.remove("properties") {
        Some(Value::Object(properties)) => properties,
        _ => Map::new(),
    };
    properties.retain(|name, _| allowed.contains(&name.as_str()));
    for name in allowed {
        properties.entry(*name).or_insert_with(|| others.clone());
    }
    map.insert("properties".to_owned(), properties.into());
}

/// Allows only properties whose names match this pattern.
fn only_pattern(map: &mut Map<String, Value>, pattern: &str) {
    if patterns::plain(pattern).map_or(true, |plain| plain.len() != 1) {
        return;
    }
    map.remove("propertyNames");
    let others =
        map.insert("additionalProperties".to_owned(), Value::Bool(false)).unwrap_or(Value::Bool(true));
    if let Some(Value::Object(properties)) = map.get_mut("properties") {
        properties.retain(|name, _| patterns::finds(pattern, name));
    }
    if others != Value::Bool(false) {
        map.insert("patternProperties".to_owned(), json!({ pattern: others }));
    }
}
