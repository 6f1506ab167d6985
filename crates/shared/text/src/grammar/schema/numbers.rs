//! Rewrites steps and bounds of numbers.

use serde_json::{Map, Value};

use super::{
    super::GrammarError,
    Preparation,
    values::{constraints, has_to_be, may_be},
    walk,
};

/// Maximum number of remainders that the library tracks for one schema's steps; each is a state of its lexer.
pub(super) const MAX_STEPS: u64 = 2_000;

/// Maximum number of fraction digits of a step, because the library counts in 32 bits.
const MAX_FRACTION: u32 = 8;

/// Smallest bound: the library negates it in 64 bits, and this is the last such value that a float
/// represents.
pub(super) const MIN_BOUND: i64 = -(i64::MAX - 1023);
pub(super) const MAX_BOUND: i64 = i64::MAX - 1023;

/// Counts the remainders that the steps of a schema require in the library.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    /// True if a value may have to conform to several steps, so that their least common multiple counts.
    together: bool,
    common: u64,
    sum: u64,
}

impl Steps {
    pub(super) fn of(root: &Value) -> Self {
        Self { together: may_come_together(root), common: 1, sum: 0 }
    }

    /// Adds a step; `None` if the total exceeds the maximum.
    fn add(self, step: u64, cost: u64) -> Option<Self> {
        let common = self.common / gcd(self.common, step) * step;
        let sum = self.sum + cost;
        let fits = sum <= MAX_STEPS && (!self.together || common <= MAX_STEPS);
        fits.then_some(Self { common: if self.together { common } else { 1 }, sum, ..self })
    }
}

/// Whether `schema` contains a keyword that combines several constraints on one value.
fn may_come_together(schema: &Value) -> bool {
    const JOIN: [&str; 8] =
        ["allOf", "if", "not", "dependentSchemas", "dependencies", "patternProperties", "oneOf", "anyOf"];
    let Value::Object(map) = schema else { return false };
    let joins = match map.get("anyOf").or_else(|| map.get("oneOf")).or_else(|| map.get("$ref")) {
        Some(_) => constraints(map).count() > 1,
        None => JOIN.iter().any(|keyword| map.contains_key(*keyword)),
    };
    joins || walk::children(map).any(may_come_together)
}

fn gcd(first: u64, second: u64) -> u64 {
    if second == 0 { first } else { gcd(second, first % second) }
}

/// Returns the digits of a step and the number of fraction digits as the library finds them; `None` if the
/// library finds others.
fn decimal(step: f64) -> Option<(u64, u32)> {
    let (mut value, mut fraction) = (step, 0);
    while value.fract() != 0.0 {
        if fraction == MAX_FRACTION {
            return None;
        }
        value *= 10.0;
        fraction += 1;
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded, whole and above 0")]
    let digits = (value <= f64::from(u32::MAX)).then_some(value as u64)?;
    #[expect(clippy::cast_possible_wrap, reason = "at most 8")]
    let scale = 10_f64.powi(fraction as i32);
    ((value / scale).total_cmp(&step).is_eq()).then_some((digits, fraction))
}

impl Preparation {
    pub(super) fn numbers(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        self.step(map)?;
        self.bounds(map)?;
        if has_to_be_whole(map) && !map.contains_key("enum") && !map.contains_key("const") {
            for (keyword, other, bound) in
                [("minimum", "exclusiveMinimum", MIN_BOUND), ("maximum", "exclusiveMaximum", MAX_BOUND)]
            {
                if !map.get(other).is_some_and(Value::is_number) {
                    map.entry(keyword).or_insert(bound.into());
                }
            }
        }
        Ok(())
    }

    fn step(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        let Some(step) = map.get("multipleOf").and_then(Value::as_f64) else { return Ok(()) };
        if !(may_be(map, "number") || may_be(map, "integer")) {
            map.remove("multipleOf");
            return Ok(());
        }
        if step <= 0.0 {
            return Err(GrammarError::NoStep);
        }
        let counted = decimal(step).and_then(|(digits, fraction)| {
            self.steps.add(digits, digits.checked_mul(u64::from(fraction) + 1)?)
        });
        if let Some(steps) = counted {
            self.steps = steps;
            return Ok(());
        }
        let message = format!(
            "all steps of a schema together may have {MAX_STEPS} remainders and {MAX_FRACTION} digits \
             after the point; write a smaller step, or 'enum' with the values"
        );
        self.drop_keyword(map, "multipleOf", message)
    }

    /// Clamps bounds to the range of the library, which allows fewer values.
    fn bounds(&mut self, map: &mut Map<String, Value>) -> Result<(), GrammarError> {
        for keyword in ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"] {
            let Some(bound) = map.get(keyword).and_then(Value::as_f64) else { continue };
            let (least, most) = (MIN_BOUND as f64, MAX_BOUND as f64);
            let is_lower = keyword.ends_with("inimum");
            if (is_lower && bound > most) || (!is_lower && bound < least) {
                let message = "numbers have at most 19 digits before the point; write a bound of 64 bits";
                self.drop_keyword(map, keyword, message)?;
            } else if bound < least || bound > most {
                let nearest = if is_lower { MIN_BOUND } else { MAX_BOUND };
                map.insert(keyword.to_owned(), nearest.into());
            }
        }
        Ok(())
    }
}

fn has_to_be_whole(map: &Map<String, Value>) -> bool {
    map.contains_key("type") && may_be(map, "integer") && !may_be(map, "number") || has_to_be(map, "integer")
}
