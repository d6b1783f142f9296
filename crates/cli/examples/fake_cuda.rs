//! `minfer` as a build with CUDA would be on a machine without a usable GPU, for the tests of refusals. With
//! `FAKE_CUDA_DEVICES=1` in the environment the driver seems to find a device, which then cannot be opened.

use std::process::ExitCode;

use minfer_graph::DeviceKind;
use minfer_runtime::{Descriptor, Unavailable};

const FAKE_CUDA: Descriptor = Descriptor {
    kind: DeviceKind::Cuda,
    priority: 200,
    unavailable: "no CUDA device is available, or CUDA is disabled (MINFER_DISABLE_CUDA)",
    count: |_| Ok(u16::from(std::env::var_os("FAKE_CUDA_DEVICES").is_some())),
    open: |_, _| Err(Unavailable("the fake CUDA device cannot be opened".to_string())),
};

fn main() -> ExitCode {
    minfer_cli::main_with(&[minfer_cpu::DESCRIPTOR, FAKE_CUDA], std::env::args_os())
}
