//! `strftime_now`: the date in prompts, in UTC, because a server has no user's time zone.

use minijinja::{Error, ErrorKind};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Calendar fields of a point in time.
struct Parts {
    year: u64,
    /// Month of the year from 1.
    month: usize,
    /// Day of the month from 1.
    day: u64,
    /// Day of the week from 0, Sunday.
    weekday: usize,
    /// Day of the year from 1.
    day_of_year: u64,
    second_of_day: u64,
}

impl Parts {
    /// Computes the fields of `now_s` seconds since 1970-01-01 00:00 UTC.
    fn new(now_s: u64) -> Self {
        let (mut day, second_of_day) = (now_s / 86_400, now_s % 86_400);
        let weekday = (day + 4) % 7;
        // Whole cycles of 400 years are removed first, which bounds the loop below for any clock value.
        let mut year = 1970 + day / 146_097 * 400;
        day %= 146_097;
        while day >= days_of_year(year) {
            day -= days_of_year(year);
            year += 1;
        }
        let day_of_year = day + 1;
        let mut month = 1;
        while day >= days_of_month(year, month) {
            day -= days_of_month(year, month);
            month += 1;
        }
        let weekday = usize::try_from(weekday).unwrap_or(0);
        Self { year, month, day: day + 1, weekday, day_of_year, second_of_day }
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_of_year(year: u64) -> u64 {
    365 + u64::from(is_leap(year))
}

fn days_of_month(year: u64, month: usize) -> u64 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 => 28 + u64::from(is_leap(year)),
        _ => 31,
    }
}

/// Formats like Python's `time.strftime(format)` in the C locale.
pub(super) fn strftime(now_s: u64, format: &str) -> Result<String, Error> {
    let parts = Parts::new(now_s);
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut code = rest.next();
        let unpadded = code == Some('-');
        if unpadded {
            code = rest.next();
        }
        let field = code.and_then(|code| field(&parts, code)).ok_or_else(|| {
            let message = format!("strftime_now does not know a code of the format \"{format}\"");
            Error::new(ErrorKind::InvalidOperation, message)
        })?;
        let kept = if unpadded { field.trim_start_matches('0') } else { &field };
        out.push_str(if kept.is_empty() { "0" } else { kept });
    }
    Ok(out)
}

/// Formats one format code; `None` for an unknown code.
fn field(parts: &Parts, code: char) -> Option<String> {
    let (hour, minute, second) =
        (parts.second_of_day / 3600, parts.second_of_day / 60 % 60, parts.second_of_day % 60);
    let hour12 = if hour.is_multiple_of(12) { 12 } else { hour % 12 };
    let (weekday, month) = (DAYS[parts.weekday], MONTHS[parts.month - 1]);
    Some(match code {
        'Y' => parts.year.to_string(),
        'y' => format!("{:02}", parts.year % 100),
        'm' => format!("{:02}", parts.month),
        'd' => format!("{:02}", parts.day),
        'e' => format!("{:2}", parts.day),
        'j' => format!("{:03}", parts.day_of_year),
        'B' => month.to_owned(),
        'b' | 'h' => month[..3].to_owned(),
        'A' => weekday.to_owned(),
        'a' => weekday[..3].to_owned(),
        'w' => parts.weekday.to_string(),
        'H' => format!("{hour:02}"),
        'I' => format!("{hour12:02}"),
        'M' => format!("{minute:02}"),
        'S' => format!("{second:02}"),
        'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
        'F' => format!("{}-{:02}-{:02}", parts.year, parts.month, parts.day),
        'T' => format!("{hour:02}:{minute:02}:{second:02}"),
        'Z' => "UTC".to_owned(),
        'z' => "+0000".to_owned(),
        '%' => "%".to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values are from Python's `datetime.fromtimestamp(s, timezone.utc).strftime(...)`.
    #[test]
    fn dates_agree_with_pythons() {
        for (now_s, expected) in [
            (0, "1970-01-01 Thursday 001 12:00:00 AM"),
            (951_827_696, "2000-02-29 Tuesday 060 12:34:56 PM"),
            (1_735_689_599, "2024-12-31 Tuesday 366 11:59:59 PM"),
            (4_107_542_400, "2100-03-01 Monday 060 12:00:00 AM"),
            (13_574_563_200, "2400-02-29 Tuesday 060 12:00:00 AM"),
        ] {
            assert_eq!(strftime(now_s, "%Y-%m-%d %A %j %I:%M:%S %p").unwrap(), expected);
        }
        assert_eq!(strftime(1_720_000_000, "%-d %b %y, %-H:%M %%").unwrap(), "3 Jul 24, 9:46 %");
    }

    #[test]
    fn an_unknown_code_is_an_error() {
        assert!(strftime(0, "%Q").is_err());
        assert!(strftime(0, "%").is_err());
    }
}
