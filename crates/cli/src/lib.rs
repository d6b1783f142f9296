//! The command line of minfer.
//!
//! In: arguments, environment, stdin. Out: text on stdout, everything else on stderr, and an exit code. What
//! was typed (`args`) becomes what is meant (each command's configuration) once, at the start of a command;
//! after that nobody reads flags or environment. Cheap checks come first: names of backends before devices,
//! devices before files, text before weights.
//!
//! Exit codes: 0 done, 1 the model or the machine failed, 2 a mistake on the command line or a refused
//! backend, 130 ended by Ctrl-C. A reader of stdout that goes away ends the program quietly with 0.
//!
//! How models are loaded and run does not belong here: that is `minfer-engine`.

mod args;
mod backends;
mod bench;
mod builtin;
mod config;
mod error;
mod info;
mod loading;
mod model;
mod run;
mod speculation;
mod units;
mod weights;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use minfer_runtime::{Descriptor, Registry};

use args::{Args, Command};
use config::Environment;
use error::Failure;

/// How a command ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    /// By Ctrl-C.
    Interrupted,
}

/// What every command gets besides its arguments.
struct Context {
    registry: Registry,
    environment: Environment,
}

/// Runs the program that `args` ask for (the first is the program's name), with these devices.
pub fn main_with(descriptors: &[Descriptor], args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args = match Args::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => return error::report_usage(&error),
    };
    match dispatch(descriptors, args) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Interrupted) => ExitCode::from(130),
        Err(Failure::ClosedPipe) => ExitCode::SUCCESS,
        Err(failure) => {
            note(format_args!("Error: {failure}"));
            ExitCode::from(failure.exit_code())
        }
    }
}

fn dispatch(descriptors: &[Descriptor], args: Args) -> Result<Outcome, Failure> {
    let registry = Registry::new(descriptors)?;
    let context = Context { registry, environment: Environment::read()? };
    match args.command {
        Command::Run(args) => run::run(args, &context),
        Command::Info(args) => info::info(args).map(|()| Outcome::Done),
        Command::Backends(args) => backends::backends(&args, &context).map(|()| Outcome::Done),
        Command::Bench(args) => bench::bench(args, &context).map(|()| Outcome::Done),
    }
}

/// One line on stderr. Nothing can be done, and nobody told, when stderr is gone.
fn note(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
