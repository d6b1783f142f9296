//! `minfer` with a device registered twice, for the test that this is refused.

use std::process::ExitCode;

fn main() -> ExitCode {
    minfer_cli::main_with(&[minfer_cpu::DESCRIPTOR, minfer_cpu::DESCRIPTOR], std::env::args_os())
}
