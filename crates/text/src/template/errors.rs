//! From minijinja's errors to ours: what is the template's fault, its wish, or a limit.

use std::error::Error as StdError;

use minijinja::{Error as JinjaError, ErrorKind};

use crate::Error;

/// The template called `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

/// The output reached its limit.
#[derive(Debug, thiserror::Error)]
#[error("{} bytes of output", super::MAX_OUTPUT)]
pub(super) struct TooLong;

/// The error of a level, from the innermost that says what happened.
pub(super) fn convert(error: JinjaError) -> Error {
    let (mut line, mut kind) = (error.line().unwrap_or(0), error.kind());
    let mut detail = error.detail().map(str::to_owned).unwrap_or_else(|| kind.to_string());
    let mut cause: Option<&(dyn StdError + 'static)> = error.source();
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return Error::TemplateRaised { message: message.clone() };
        }
        if is_too_long(inner) {
            return Error::TemplateLimit { what: TooLong.to_string(), line };
        }
        if let Some(inner) = inner.downcast_ref::<JinjaError>() {
            (line, kind) = (inner.line().unwrap_or(line), inner.kind());
            detail = inner.detail().map(str::to_owned).unwrap_or_else(|| kind.to_string());
        }
        cause = inner.source();
    }
    classify(kind, detail, line)
}

fn classify(kind: ErrorKind, detail: String, line: usize) -> Error {
    match kind {
        ErrorKind::SyntaxError | ErrorKind::InvalidDelimiter => Error::TemplateSyntax { line, detail },
        ErrorKind::UnknownFilter
        | ErrorKind::UnknownTest
        | ErrorKind::UnknownFunction
        | ErrorKind::UnknownMethod
        | ErrorKind::TemplateNotFound => Error::TemplateUnknown { line, construct: detail },
        ErrorKind::OutOfFuel => {
            Error::TemplateLimit { what: format!("{} units of work", super::MAX_FUEL), line }
        }
        // The engine has no kind of its own for this.
        ErrorKind::InvalidOperation if detail.contains("recursion limit") => {
            Error::TemplateLimit { what: format!("{} levels of nesting", super::MAX_RECURSION), line }
        }
        _ => Error::TemplateFailed { line, detail },
    }
}

/// An I/O error hides the one that it was made of from `source`.
fn is_too_long(error: &(dyn StdError + 'static)) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    error.is::<TooLong>() || io.and_then(|io| io.get_ref()).is_some_and(|inner| inner.is::<TooLong>())
}
