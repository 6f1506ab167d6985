//! `holobiont slo`: shows the SLO targets of each service class, the measured latencies, and the waiting
//! tenants.

use control_protocol::status::{
    DeploymentStatus,
    classes::{ClassStatus, ClassTenant, ObjectiveStatus},
};

use crate::{
    client::{ClientError, GatewayClient},
    terminal::{PrintFormat, Terminal, TextStyle, printable, table::table},
};

pub(crate) fn run(url: &str, terminal: Terminal) -> Result<(), ClientError> {
    let body = GatewayClient::new(url, terminal).get("/v1/status")?;
    if terminal.format == PrintFormat::Json {
        terminal.print(&body["classes"]);
        return Ok(());
    }
    let status: DeploymentStatus = serde_json::from_value(body).map_err(ClientError::Garbled)?;
    terminal.print(text(terminal.ink(), &status));
    Ok(())
}

fn text(ink: TextStyle, status: &DeploymentStatus) -> String {
    let classes: Vec<_> = status.classes.iter().map(class_row).collect();
    let head = [
        "CLASS",
        "WEIGHT",
        "PRIORITY",
        "REQUESTS",
        "WAITING",
        "TOKENS",
        "TTFT",
        "KEPT",
        "TPOT",
        "KEPT",
        "REFUSED",
        "THROTTLED",
    ];
    let tenants: Vec<_> = status.classes.iter().flat_map(tenant_rows).collect();
    let mut parts = vec![table(ink, head, &classes)];
    if !tenants.is_empty() {
        parts.push(table(ink, ["TENANT", "CLASS", "WAITING", "TOKENS"], &tenants));
    }
    parts.join("\n\n")
}

fn class_row(class: &ClassStatus) -> [String; 12] {
    let ClassStatus { ttft, tpot, .. } = class;
    [
        printable(&class.name),
        class.weight.to_string(),
        class.priority.to_string(),
        class.requests.to_string(),
        class.waiting.to_string(),
        class.tokens.to_string(),
        seen(ttft),
        kept(ttft),
        seen(tpot),
        kept(tpot),
        (ttft.refused + tpot.refused).to_string(),
        class.throttled.to_string(),
    ]
}

fn tenant_rows(class: &ClassStatus) -> impl Iterator<Item = [String; 4]> + '_ {
    let row = |tenant: &ClassTenant| {
        [
            printable(&tenant.tenant),
            printable(&class.name),
            tenant.waiting.to_string(),
            tenant.tokens.to_string(),
        ]
    };
    class.tenants.iter().map(row)
}

/// Formats the measured mean and the target.
fn seen(objective: &ObjectiveStatus) -> String {
    let mean = objective.mean_ms.map_or_else(|| "-".to_owned(), |mean| format!("{mean:.0}"));
    match objective.promised_ms {
        None => format!("{mean} ms"),
        Some(promised) => format!("{mean} of {promised} ms"),
    }
}

/// Formats the share of admitted requests that met the target.
fn kept(objective: &ObjectiveStatus) -> String {
    match objective.met + objective.missed {
        0 => "-".to_owned(),
        #[expect(clippy::cast_precision_loss, reason = "for people to read")]
        all => format!("{:.1} %", objective.met as f64 / all as f64 * 100.0),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_class_says_what_was_promised_seen_and_kept() {
        let status = json!({ "classes": [
            { "name": "default", "weight": 1, "priority": 1 },
            {
                "name": "gold", "weight": 3, "priority": 0, "requests": 200, "throttled": 4, "tokens": 5000, "waiting": 2,
                "ttft": { "promised_ms": 500, "mean_ms": 312.4, "met": 198, "missed": 2, "refused": 7 },
                "tpot": { "mean_ms": 41.0 }, "tenants": [{ "tenant": "alice", "waiting": 2, "tokens": 5000 }],
            },
        ]});
        let text = text(TextStyle::None, &serde_json::from_value(status).unwrap());
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["default", "1", "1", "0", "0", "0", "-", "ms", "-", "-", "ms", "-", "0", "0"]);
        let gold = [
            "gold", "3", "0", "200", "2", "5000", "312", "of", "500", "ms", "99.0", "%", "41", "ms", "-",
            "7", "4",
        ];
        assert_eq!(lines[2], gold);
        assert_eq!(lines[5], ["alice", "gold", "2", "5000"]);
    }
}
