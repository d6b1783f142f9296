//! `strftime_now`: the date and time in UTC, in the format of C's `strftime`.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
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

/// Formats a time; a directive that is not known is refused.
pub(super) fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let date = Date::of(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // `%-d` is `%d` without the leading zero.
        let short = directive == Some('-');
        if short {
            directive = chars.next();
        }
        let width = if short { 1 } else { 2 };
        let hour12 = (hour + 11) % 12 + 1;
        let _ = match directive {
            Some('Y') => write!(out, "{}", date.year),
            Some('y') => write!(out, "{:0width$}", date.year % 100),
            Some('m') => write!(out, "{:0width$}", date.month),
            Some('d') => write!(out, "{:0width$}", date.day),
            Some('j') => write!(out, "{:0w$}", date.day_of_year, w = if short { 1 } else { 3 }),
            Some('H') => write!(out, "{hour:0width$}"),
            Some('I') => write!(out, "{hour12:0width$}"),
            Some('M') => write!(out, "{minute:0width$}"),
            Some('S') => write!(out, "{second:0width$}"),
            Some('p') => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('B') => write!(out, "{}", MONTHS[date.month - 1]),
            Some('b') => write!(out, "{}", &MONTHS[date.month - 1][..3]),
            Some('A') => write!(out, "{}", DAYS[date.weekday]),
            Some('a') => write!(out, "{}", &DAYS[date.weekday][..3]),
            Some('F') => write!(out, "{}-{:02}-{:02}", date.year, date.month, date.day),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            Some('%') => write!(out, "%"),
            _ => {
                let detail = format!("strftime_now: unknown directive in {format:?}");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        };
    }
    Ok(out)
}

struct Date {
    year: u64,
    /// 1 to 12.
    month: usize,
    /// 1 to 31.
    day: u64,
    /// 1 to 366.
    day_of_year: u64,
    /// 0 is Monday.
    weekday: usize,
}

impl Date {
    /// The Gregorian date of a number of days since 1970-01-01.
    fn of(days: u64) -> Date {
        let weekday = ((days + 3) % 7) as usize;
        // Whole cycles of 400 years have 146 097 days; the rest is counted year by year.
        let (mut year, mut rest) = (1970 + days / 146_097 * 400, days % 146_097);
        while rest >= days_in_year(year) {
            rest -= days_in_year(year);
            year += 1;
        }
        let day_of_year = rest + 1;
        let february = days_in_year(year) - 337;
        let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let mut month = 1;
        for length in lengths {
            if rest < length {
                break;
            }
            rest -= length;
            month += 1;
        }
        Date { year, month, day: rest + 1, day_of_year, weekday }
    }
}

fn days_in_year(year: u64) -> u64 {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    if leap { 366 } else { 365 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// References: `date -u -d @SECONDS` of GNU coreutils.
    #[test]
    fn dates() {
        let at = |seconds, format| strftime(UNIX_EPOCH + Duration::from_secs(seconds), format).unwrap();
        assert_eq!(at(0, "%A %d %B %Y %T"), "Thursday 01 January 1970 00:00:00");
        assert_eq!(at(1_709_210_096, "%a %-d %b %y, %I:%M %p, %j"), "Thu 29 Feb 24, 12:34 PM, 060");
        assert_eq!(at(4_107_542_399, "%F"), "2100-02-28");
        assert_eq!(at(4_107_542_400, "%F 100%%"), "2100-03-01 100%");
    }

    #[test]
    fn an_unknown_directive_is_refused() {
        assert!(strftime(UNIX_EPOCH, "%Q").is_err());
        assert!(strftime(UNIX_EPOCH, "%").is_err());
    }
}
