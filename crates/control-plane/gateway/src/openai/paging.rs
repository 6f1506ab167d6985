//! Pages of lists, newest first, in OpenAI's format.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{errors::ApiError, training::table::Page};

#[derive(Debug, Deserialize)]
pub(crate) struct PageQuery {
    after: Option<String>,
    limit: Option<String>,
    order: Option<String>,
}

impl PageQuery {
    /// Checks the query; a page has at most `most` items.
    ///
    /// # Errors
    /// Names the query parameter that is out of range.
    pub(crate) fn checked(&self, most: u32) -> Result<Page, ApiError> {
        let limit = match self.limit.as_deref().map(str::parse::<u32>) {
            None => most.min(20),
            Some(Ok(limit)) if (1..=most).contains(&limit) => limit,
            Some(_) => {
                return Err(ApiError::invalid("limit", format!("'limit' must be a number from 1 to {most}")));
            }
        };
        match self.order.as_deref() {
            None | Some("desc") => Ok(Page { after: self.after.clone(), limit }),
            Some(_) => Err(ApiError::invalid("order", "'order' must be 'desc', with the newest first")),
        }
    }
}

pub(crate) fn list(data: &[Value], has_more: bool) -> Value {
    let id = |item: Option<&Value>| item.and_then(|item| item.get("id")).cloned();
    let (first, last) = (id(data.first()), id(data.last()));
    json!({ "object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more })
}
