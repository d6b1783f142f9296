//! Names, numbers, order, the fence and the three refusals, with descriptors made up for the purpose.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{cpu, everything as any_op, gpu};
use minfer_runtime::{
    BackendError, Descriptor, Device, DeviceId, DeviceKind, Fence, OpenOptions, Registry, Unavailable,
};

const NO_CUDA: &str = "no CUDA device is available, or CUDA is disabled (MINFER_DISABLE_CUDA)";

fn one(_: &OpenOptions) -> Result<u16, Unavailable> {
    Ok(1)
}

fn two(_: &OpenOptions) -> Result<u16, Unavailable> {
    Ok(2)
}

fn none(_: &OpenOptions) -> Result<u16, Unavailable> {
    Ok(0)
}

fn lost(_: &OpenOptions) -> Result<u16, Unavailable> {
    Err(Unavailable("the driver is older than 525".to_string()))
}

fn untouched(_: &OpenOptions) -> Result<u16, Unavailable> {
    panic!("a device was touched before every name was judged")
}

fn open_cpu(_: u16, _: &OpenOptions) -> Result<Arc<dyn Device>, Unavailable> {
    Ok(cpu().build())
}

fn open_metal(ordinal: u16, _: &OpenOptions) -> Result<Arc<dyn Device>, Unavailable> {
    Ok(gpu(DeviceKind::Metal, ordinal, any_op()).build())
}

fn open_cuda(ordinal: u16, _: &OpenOptions) -> Result<Arc<dyn Device>, Unavailable> {
    Ok(gpu(DeviceKind::Cuda, ordinal, any_op()).build())
}

fn open_vulkan(ordinal: u16, _: &OpenOptions) -> Result<Arc<dyn Device>, Unavailable> {
    Ok(gpu(DeviceKind::Vulkan, ordinal, any_op()).build())
}

fn open_broken(ordinal: u16, _: &OpenOptions) -> Result<Arc<dyn Device>, Unavailable> {
    Err(Unavailable(format!("instance {ordinal} does not answer")))
}

fn never(_: u16, _: &OpenOptions) -> Result<Arc<dyn Device>, Unavailable> {
    panic!("a device was opened")
}

const CPU: Descriptor =
    Descriptor { kind: DeviceKind::Cpu, priority: 100, unavailable: "no cpu", count: one, open: open_cpu };
const METAL: Descriptor = Descriptor {
    kind: DeviceKind::Metal,
    priority: 300,
    unavailable: "no Metal",
    count: one,
    open: open_metal,
};
const CUDA: Descriptor =
    Descriptor { kind: DeviceKind::Cuda, priority: 200, unavailable: NO_CUDA, count: two, open: open_cuda };
const VULKAN: Descriptor = Descriptor {
    kind: DeviceKind::Vulkan,
    priority: 150,
    unavailable: "no GPU",
    count: two,
    open: open_vulkan,
};

fn registry(descriptors: &[Descriptor]) -> Registry {
    Registry::new(descriptors).unwrap()
}

fn everything() -> Registry {
    registry(&[CPU, METAL, CUDA, VULKAN])
}

fn flags(values: &[&str]) -> Vec<String> {
    values.iter().map(|v| v.to_string()).collect()
}

fn fence(registry: &Registry, values: &[&str]) -> Result<Fence, BackendError> {
    Fence::parse(&flags(values), None, registry)
}

fn refusal(registry: &Registry, values: &[&str]) -> String {
    fence(registry, values).expect_err("a refusal").to_string()
}

fn opened(registry: &Registry, fence: &Fence) -> Result<Vec<String>, BackendError> {
    let devices = registry.open(fence, &OpenOptions::default())?;
    Ok(devices.iter().map(|d| d.id().to_string()).collect())
}

/// The numbers are in files: literals, so that a change of the enum shows.
#[test]
fn numbers_and_names_are_pinned() {
    let table = [(DeviceKind::Cpu, 0, "cpu"), (DeviceKind::Metal, 1, "metal"), (DeviceKind::Cuda, 2, "cuda")];
    for (kind, number, name) in table.into_iter().chain([(DeviceKind::Vulkan, 3, "vulkan")]) {
        assert_eq!(kind.number(), number);
        assert_eq!(DeviceKind::from_number(number), Some(kind));
        assert_eq!(kind.name(), name);
        assert_eq!(kind.to_string(), name);
    }
    assert_eq!(DeviceKind::ALL.len(), 4);
    assert_eq!(DeviceKind::from_number(4), None);
    assert_eq!(DeviceKind::from_number(u16::MAX), None);
}

#[test]
fn identity_order_is_by_number_then_ordinal() {
    let id = DeviceId::new;
    let ordered = [
        DeviceId::CPU,
        id(DeviceKind::Metal, 0),
        id(DeviceKind::Metal, 1),
        id(DeviceKind::Cuda, 0),
        id(DeviceKind::Cuda, 1),
        id(DeviceKind::Vulkan, 0),
    ];
    assert!(ordered.is_sorted());
    assert_eq!(ordered.map(|d| d.to_string()), ["cpu", "metal", "metal:1", "cuda", "cuda:1", "vulkan"]);
}

#[test]
fn names_are_trimmed_and_in_any_case() {
    for text in ["cuda", "CUDA", " Cuda ", "\tcUdA\n"] {
        assert_eq!(DeviceKind::from_name(text), Some(DeviceKind::Cuda), "{text:?}");
    }
    for text in ["", "cud", "cuda0", "gpu", "cu da"] {
        assert_eq!(DeviceKind::from_name(text), None, "{text:?}");
    }
    let fence = fence(&everything(), &[" METAL ,vUlkan", "Cuda"]).unwrap();
    let named: Vec<_> = fence.named().iter().map(ToString::to_string).collect();
    assert_eq!(named, ["metal", "vulkan", "cuda"], "lower case, in the order given");
}

#[test]
fn priority_orders_devices_and_identity_does_not() {
    for order in [[CPU, METAL, CUDA, VULKAN], [VULKAN, CUDA, METAL, CPU], [CUDA, CPU, VULKAN, METAL]] {
        let ids = opened(&registry(&order), &Fence::all()).unwrap();
        assert_eq!(ids, ["metal", "cuda", "cuda:1", "vulkan", "vulkan:1", "cpu"]);
    }
    let swapped = [CPU, Descriptor { priority: 150, ..METAL }, Descriptor { priority: 300, ..VULKAN }];
    assert_eq!(opened(&registry(&swapped), &Fence::all()).unwrap(), ["vulkan", "vulkan:1", "metal", "cpu"]);
    let equal = [CPU, Descriptor { priority: 200, ..METAL }, CUDA];
    assert_eq!(opened(&registry(&equal), &Fence::all()).unwrap(), ["metal", "cuda", "cuda:1", "cpu"]);
}

#[test]
fn duplicates_and_a_missing_cpu_are_refused() {
    let twice = Registry::new(&[CPU, CUDA, CUDA]).err().expect("a refusal");
    assert_eq!(twice, BackendError::Duplicate { kind: DeviceKind::Cuda });
    assert_eq!(twice.to_string(), "backend 'cuda' is registered twice");
    let lacking = Registry::new(&[CUDA]).err().expect("a refusal");
    assert_eq!(lacking, BackendError::NoCpu);
    assert_eq!(lacking.to_string(), "no cpu backend is registered; every build needs one");
}

#[test]
fn an_unknown_name_is_refused_with_the_known_ones() {
    let text = "unknown backend 'gpu2'; known backends are: cpu, metal, cuda, vulkan";
    assert_eq!(refusal(&everything(), &["gpu2"]), text);
    assert_eq!(refusal(&registry(&[CPU]), &[" gpu2 "]), text, "the same on every build");
    for bad in ["gpu:1", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:65536", "cuda:1:2", ":1"] {
        let expected = format!("unknown backend '{bad}'; known backends are: cpu, metal, cuda, vulkan");
        assert_eq!(refusal(&everything(), &[bad]), expected);
    }
}

#[test]
fn a_kind_that_is_not_compiled_in_is_refused_with_the_reason() {
    let small = registry(&[CPU]);
    for (name, why) in [
        ("cuda", "the CUDA backend is compiled only with --features cuda"),
        ("metal", "the Metal backend is compiled only on macOS with --features metal"),
        ("vulkan", "the Vulkan backend is compiled only with --features vulkan"),
    ] {
        let expected = format!("backend '{name}' is known but not compiled into this build: {why}");
        assert_eq!(refusal(&small, &[name]), expected);
        assert_eq!(refusal(&small, &[&format!(" {}:1", name.to_uppercase())]), expected);
    }
}

#[test]
fn a_named_backend_that_is_not_available_is_refused() {
    let prefix = "backend 'cuda' is compiled in but not available on this machine: ";
    for (count, why) in [(none as fn(&_) -> _, NO_CUDA), (lost, "the driver is older than 525")] {
        let registry = registry(&[CPU, Descriptor { count, ..CUDA }]);
        let fence = fence(&registry, &["cuda"]).unwrap();
        assert_eq!(opened(&registry, &fence).unwrap_err().to_string(), format!("{prefix}{why}"));
        assert_eq!(opened(&registry, &Fence::all()).unwrap(), ["cpu"], "left out when nobody named it");
    }
}

#[test]
fn a_disabled_kind_is_not_even_counted() {
    let registry = registry(&[CPU, Descriptor { count: untouched, open: never, ..CUDA }]);
    let options = OpenOptions { disabled: vec![DeviceKind::Cuda], ..OpenOptions::default() };
    let devices = registry.open(&Fence::all(), &options).unwrap();
    assert_eq!(devices.iter().map(|d| d.id()).collect::<Vec<_>>(), [DeviceId::CPU]);
    let named = fence(&registry, &["cuda"]).unwrap();
    let error = registry.open(&named, &options).err().expect("a refusal");
    let expected = format!("backend 'cuda' is compiled in but not available on this machine: {NO_CUDA}");
    assert_eq!(error.to_string(), expected);
}

#[test]
fn an_instance_that_does_not_open_is_an_error_only_when_named() {
    let registry = registry(&[CPU, Descriptor { open: open_broken, ..CUDA }]);
    assert_eq!(opened(&registry, &Fence::all()).unwrap(), ["cpu"]);
    let named = fence(&registry, &["cuda:1"]).unwrap();
    assert_eq!(
        opened(&registry, &named).unwrap_err().to_string(),
        "backend 'cuda:1' is compiled in but not available on this machine: instance 1 does not answer"
    );
}

#[test]
fn the_cpu_is_never_left_out_quietly() {
    for broken in [Descriptor { count: lost, ..CPU }, Descriptor { open: open_broken, ..CPU }] {
        let registry = registry(&[broken, CUDA]);
        let error = opened(&registry, &Fence::all()).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("backend 'cpu' is compiled in but not available on this machine: "),
            "{text}"
        );
    }
}

/// Names are judged by position, all of them before any device is counted or opened.
#[test]
fn names_are_judged_first_and_in_order() {
    let guarded = [
        Descriptor { count: untouched, open: never, ..CPU },
        Descriptor { count: untouched, open: never, ..CUDA },
    ];
    let registry = registry(&guarded);
    assert!(refusal(&registry, &["cuda,nope"]).starts_with("unknown backend 'nope'"));
    assert!(refusal(&registry, &["nope,metal"]).starts_with("unknown backend 'nope'"));
    assert!(refusal(&registry, &["metal", "nope"]).starts_with("backend 'metal' is known but not compiled"));
    assert!(refusal(&registry, &["cuda", "cpu", "vulkan"]).starts_with("backend 'vulkan' is known but not"));
    assert!(fence(&registry, &["cuda,cpu"]).is_ok(), "a good list touches nothing either");
}

#[test]
fn an_empty_list_is_refused() {
    for values in [&[","] as &[&str], &[""], &["  "], &[" , ,", ","]] {
        assert_eq!(
            refusal(&everything(), values),
            "--backend names no backend; leave it out to use every device, or name some of: \
             cpu, metal, cuda, vulkan"
        );
    }
    let env = Fence::parse(&[], Some(" ,"), &everything()).unwrap_err();
    assert_eq!(
        env.to_string(),
        "MINFER_BACKENDS names no backend; leave it out to use every device, or name some of: \
         cpu, metal, cuda, vulkan"
    );
    assert!(fence(&everything(), &[",cuda,"]).is_ok(), "stray commas beside a name are harmless");
}

#[test]
fn the_variable_counts_without_a_flag_and_the_flag_wins() {
    let registry = everything();
    let parse = |values: &[&str], env| Fence::parse(&flags(values), env, &registry);
    for unset in [None, Some(""), Some("  ")] {
        assert_eq!(parse(&[], unset).unwrap(), Fence::all(), "{unset:?}");
    }
    assert_eq!(
        opened(&registry, &parse(&[], Some("vulkan")).unwrap()).unwrap(),
        ["vulkan", "vulkan:1", "cpu"]
    );
    assert_eq!(opened(&registry, &parse(&["metal"], Some("vulkan")).unwrap()).unwrap(), ["metal", "cpu"]);
    assert!(parse(&["metal"], Some("nope")).is_ok(), "the variable is not even read");
    assert!(parse(&[","], Some("vulkan")).is_err(), "an empty flag does not fall back to the variable");
    assert!(parse(&[], Some("nope")).unwrap_err().to_string().starts_with("unknown backend 'nope'"));
}

#[test]
fn a_fence_only_removes_and_the_cpu_always_stays() {
    let registry = everything();
    let ids = |values: &[&str]| opened(&registry, &fence(&registry, values).unwrap()).unwrap();
    assert_eq!(ids(&["cpu"]), ["cpu"]);
    assert_eq!(ids(&["cuda"]), ["cuda", "cuda:1", "cpu"]);
    assert_eq!(ids(&["cuda:1"]), ["cuda:1", "cpu"]);
    assert_eq!(ids(&["vulkan:0,cuda:1"]), ["cuda:1", "vulkan", "cpu"], "preference, not the list's order");
    assert_eq!(ids(&["cuda,cuda:1"]), ["cuda", "cuda:1", "cpu"]);
    assert_eq!(ids(&["metal,cuda,vulkan,cpu"]), opened(&registry, &Fence::all()).unwrap());
    let open = Fence::all();
    assert!(open.named().is_empty() && open.allows(DeviceKind::Vulkan, 7));
}

#[test]
fn an_ordinal_that_the_machine_lacks_is_not_available() {
    let registry = everything();
    for (name, has) in [("cuda:2", 2), ("metal:1", 1), ("cpu:1", 1)] {
        let fence = fence(&registry, &[name]).unwrap();
        assert_eq!(
            opened(&registry, &fence).unwrap_err().to_string(),
            format!(
                "backend '{name}' is compiled in but not available on this machine: \
                 this machine has {has} of them, numbered from 0"
            )
        );
    }
}

/// The third class comes before any device is opened, so that a refusal costs nothing.
#[test]
fn a_missing_named_device_is_found_before_another_is_opened() {
    let registry = registry(&[Descriptor { open: never, ..CPU }, Descriptor { count: none, ..CUDA }]);
    let named = fence(&registry, &["cuda"]).unwrap();
    assert!(matches!(opened(&registry, &named), Err(BackendError::Unavailable { .. })));
}

#[test]
fn two_registries_share_nothing() {
    let (small, large) = (registry(&[CPU]), everything());
    assert!(refusal(&small, &["cuda"]).contains("not compiled"));
    assert!(fence(&large, &["cuda"]).is_ok());
    assert_eq!(opened(&small, &Fence::all()).unwrap(), ["cpu"]);
}
