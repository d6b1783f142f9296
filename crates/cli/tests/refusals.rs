//! Backends by name: the three refusals word by word, what comes before what, and the fence.
#![cfg(feature = "builtin-model")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Said, example, minfer, refused, said};

/// A model path that must never be looked at: if it were, the message would be another.
const NOWHERE: &str = "/does/not/exist.gguf";

const UNKNOWN: &str = "Error: unknown backend 'gpu2'; known backends are: cpu, metal, cuda, vulkan";
const NOT_COMPILED: &str = "Error: backend 'cuda' is known but not compiled into this build: the CUDA backend is \
                            compiled only with --features cuda";
const UNAVAILABLE: &str = "Error: backend 'cuda' is compiled in but not available on this machine: no CUDA device \
                           is available, or CUDA is disabled (MINFER_DISABLE_CUDA)";

#[track_caller]
fn fake_refused(args: &[&str], env: &[(&str, &str)], error: &str) {
    let mut command = example("fake_cuda", args);
    command.envs(env.iter().copied());
    let expected = Said { code: Some(2), out: String::new(), err: format!("{error}\n") };
    assert_eq!(said(command), expected);
}

#[test]
fn unknown_names_come_before_the_model_path() {
    for command in ["run", "bench"] {
        refused(&[command, "-m", NOWHERE, "--backend", "gpu2"], 2, UNKNOWN);
    }
    // Before stdin is read, and inside lists.
    refused(&["run", "-m", NOWHERE, "--backend", "cpu, gpu2"], 2, UNKNOWN);
    refused(&["run", "-m", NOWHERE, "--require-device", "gpu2", "hi"], 2, UNKNOWN);
    let ordinal = UNKNOWN.replace("gpu2", "cpu:x");
    refused(&["run", "-m", NOWHERE, "--backend", "cpu:x", "hi"], 2, &ordinal);
}

#[test]
fn kinds_that_are_not_compiled_in() {
    refused(&["run", "-m", NOWHERE, "--backend", "cuda", "hi"], 2, NOT_COMPILED);
    refused(&["bench", "-m", NOWHERE, "--backend", " CUDA "], 2, NOT_COMPILED);
    let metal = "Error: backend 'metal' is known but not compiled into this build: the Metal backend is compiled \
                 only on macOS with --features metal";
    refused(&["run", "-m", NOWHERE, "--backend", "cpu", "--backend", "metal", "hi"], 2, metal);
    let vulkan = "Error: backend 'vulkan' is known but not compiled into this build: the Vulkan backend is compiled \
                  only with --features vulkan";
    refused(&["run", "-m", NOWHERE, "--backend", "vulkan:1", "hi"], 2, vulkan);
}

#[test]
fn kinds_that_are_not_available() {
    fake_refused(&["run", "-m", NOWHERE, "--backend", "cuda", "hi"], &[], UNAVAILABLE);
    fake_refused(&["bench", "-m", NOWHERE, "--backend", "cuda"], &[], UNAVAILABLE);
    fake_refused(&["run", "-m", NOWHERE, "--require-device", "cuda", "hi"], &[], UNAVAILABLE);
    // The name is shown as it was typed.
    let mut command = example("fake_cuda", &["run", "-m", NOWHERE, "--backend", "cuda:1", "hi"]);
    command.env("FAKE_CUDA_DEVICES", "1");
    let expected = "Error: backend 'cuda:1' is compiled in but not available on this machine: this machine has 1 of \
                    them, numbered from 0\n";
    assert_eq!(said(command), Said { code: Some(2), out: String::new(), err: expected.to_string() });
}

#[test]
fn a_disabled_kind_is_not_available() {
    let found = [("FAKE_CUDA_DEVICES", "1")];
    // Without the variable the device is found and fails in its own words.
    let opening = "Error: backend 'cuda' is compiled in but not available on this machine: the fake CUDA device \
                   cannot be opened";
    fake_refused(&["run", "-m", NOWHERE, "--backend", "cuda", "hi"], &found, opening);
    // Present counts, with any value.
    for value in ["1", "0", ""] {
        let env = [("FAKE_CUDA_DEVICES", "1"), ("MINFER_DISABLE_CUDA", value)];
        fake_refused(&["run", "-m", NOWHERE, "--backend", "cuda", "hi"], &env, UNAVAILABLE);
    }
}

#[test]
fn a_disabled_kind_that_nobody_named_is_left_out() {
    for env in [("MINFER_DISABLE_CUDA", "1"), ("FAKE_CUDA_DEVICES", "1")] {
        let mut command = example("fake_cuda", &["run", "What is 27 + 58?"]);
        command.env(env.0, env.1);
        let said = said(command);
        assert_eq!((said.code, said.out.as_str()), (Some(0), "27 + 58 = 85.\n"), "{}", said.err);
    }
}

#[test]
fn an_empty_list_is_refused() {
    let flag = "Error: --backend names no backend; leave it out to use every device, or name some of: cpu, metal, \
                cuda, vulkan";
    refused(&["run", "-m", NOWHERE, "--backend", ",", "hi"], 2, flag);
    refused(&["run", "-m", NOWHERE, "--backend", "", "hi"], 2, flag);
    refused(
        &["run", "-m", NOWHERE, "--require-device", ",", "hi"],
        2,
        "Error: --require-device names no backend",
    );
    let mut command = minfer(&["run", "-m", NOWHERE, "hi"]);
    command.env("MINFER_BACKENDS", ",");
    let variable = flag.replace("--backend", "MINFER_BACKENDS") + "\n";
    assert_eq!(said(command), Said { code: Some(2), out: String::new(), err: variable });
}

#[test]
fn the_variable_is_a_fence_and_the_flag_wins() {
    let mut command = minfer(&["run", "-m", NOWHERE, "hi"]);
    command.env("MINFER_BACKENDS", "gpu2");
    let expected = Said { code: Some(2), out: String::new(), err: format!("{UNKNOWN}\n") };
    assert_eq!(said(command), expected);

    // With the flag the variable is not even judged: the path is what fails.
    let mut command = minfer(&["run", "-m", NOWHERE, "--backend", "cpu", "hi"]);
    command.env("MINFER_BACKENDS", "gpu2");
    let err = format!("Error: no such file: {NOWHERE}\n");
    assert_eq!(said(command), Said { code: Some(1), out: String::new(), err });

    // Empty counts as unset.
    let mut command = minfer(&["run", "-m", NOWHERE, "hi"]);
    command.env("MINFER_BACKENDS", "");
    assert_eq!(said(command).code, Some(1));
}

#[test]
fn the_cpu_fence_changes_nothing() {
    let prompt = "Sort these numbers from smallest to largest: 42, 7, 19, 3.";
    let free = said(minfer(&["run", prompt]));
    let fenced =
        said(minfer(&["run", "--backend", "cpu", "--require-device", "cpu", "--sync-copies", prompt]));
    assert_eq!((free.code, fenced.code), (Some(0), Some(0)));
    assert_eq!(free.out, fenced.out);
    assert!(!free.out.trim().is_empty());
}

#[test]
fn requirements_that_cannot_be_met() {
    let error = "Error: --require-device takes a kind such as 'cpu', not 'cpu:0'";
    refused(&["run", "-m", NOWHERE, "--require-device", "cpu:0", "hi"], 2, error);
    let args = ["run", "-m", NOWHERE, "--backend", "cpu", "--require-device", "cuda", "hi"];
    let fenced = "Error: --require-device cuda cannot be met: the devices in use are cpu";
    fake_refused(&args, &[("FAKE_CUDA_DEVICES", "1")], fenced);
}

#[test]
fn a_device_registered_twice() {
    let expected = Said {
        code: Some(2),
        out: String::new(),
        err: "Error: backend 'cpu' is registered twice\n".to_string(),
    };
    assert_eq!(said(example("duplicate_cpu", &["backends"])), expected);
}

#[test]
fn switches_have_two_values() {
    let mut command = minfer(&["run", "-m", NOWHERE, "hi"]);
    command.env("MINFER_SYNC_COPIES", "perhaps");
    let err = "Error: MINFER_SYNC_COPIES is 'perhaps'; it must be 1 or 0\n".to_string();
    assert_eq!(said(command), Said { code: Some(2), out: String::new(), err });
}
