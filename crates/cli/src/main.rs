//! The `minfer` binary: the devices of this build, and nothing else. Everything is in the library, so that
//! tests can build the same program with other devices.

use std::process::ExitCode;

use minfer_runtime::Descriptor;

/// Every device compiled into this build.
const DESCRIPTORS: [Descriptor; 1] = [minfer_cpu::DESCRIPTOR];

fn main() -> ExitCode {
    minfer_cli::main_with(&DESCRIPTORS, std::env::args_os())
}
