//! The list of device kinds in this build, and opening the devices that a fence leaves.

use std::sync::Arc;

use minfer_graph::DeviceKind;

use crate::device::Device;
use crate::fence::{BackendError, BackendName, Fence};

/// Why a kind that is compiled in cannot be used on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable(pub String);

/// What opening a device may depend on. Parsed once from flags and environment, passed down.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Threads of the CPU device; its physical cores if `None`.
    pub threads: Option<usize>,
    /// Kinds that the environment disables (`MINFER_DISABLE_CUDA`, `MINFER_DISABLE_METAL`).
    pub disabled: Vec<DeviceKind>,
    /// How weights are kept in memory.
    pub weights: WeightOptions,
}

/// How weights are kept in the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightOptions {
    /// Weights come as pages of mapped files where they lie in one, which take no memory of their own.
    pub mmap: bool,
    /// Keep them from being swapped out or dropped.
    pub lock: bool,
    /// Bring matrices into the kernels' layout when they are loaded; else they stay as in the file, and parts of
    /// them are brought into it again for every product.
    pub repack: bool,
}

impl Default for WeightOptions {
    fn default() -> WeightOptions {
        WeightOptions { mmap: true, lock: false, repack: true }
    }
}

/// Opens the instance with an ordinal.
pub type OpenInstance = fn(u16, &OpenOptions) -> Result<Arc<dyn Device>, Unavailable>;

/// What a device crate offers to the registry.
#[derive(Clone, Copy)]
pub struct Descriptor {
    /// The kind; its name and number come with it.
    pub kind: DeviceKind,
    /// Assignment preference, higher first: metal 300, cuda 200, vulkan 150, cpu 100.
    pub priority: u32,
    /// What to say when there is no such device or it is disabled.
    pub unavailable: &'static str,
    /// How many instances this machine has.
    pub count: fn(&OpenOptions) -> Result<u16, Unavailable>,
    /// Opens one instance.
    pub open: OpenInstance,
}

/// The compiled-in descriptors, in identity order.
pub struct Registry {
    descriptors: Vec<Descriptor>,
}

impl Registry {
    /// Builds the registry from the one list of compiled-in descriptors.
    ///
    /// # Errors
    /// [`BackendError::Duplicate`] when a kind appears twice, [`BackendError::NoCpu`] without a CPU.
    pub fn new(descriptors: &[Descriptor]) -> Result<Registry, BackendError> {
        let mut descriptors = descriptors.to_vec();
        descriptors.sort_by_key(|d| d.kind);
        if let Some(w) = descriptors.windows(2).find(|w| w[0].kind == w[1].kind) {
            return Err(BackendError::Duplicate { kind: w[0].kind });
        }
        if !descriptors.iter().any(|d| d.kind == DeviceKind::Cpu) {
            return Err(BackendError::NoCpu);
        }
        Ok(Registry { descriptors })
    }

    /// The descriptor of a kind, if it is compiled in.
    pub fn descriptor(&self, kind: DeviceKind) -> Option<&Descriptor> {
        self.descriptors.iter().find(|d| d.kind == kind)
    }

    /// How many instances of a kind this machine has.
    ///
    /// # Errors
    /// Not compiled in, or not available with the reason.
    pub fn count(&self, kind: DeviceKind, options: &OpenOptions) -> Result<u16, BackendError> {
        let name = BackendName { kind, ordinal: None };
        let unavailable = |why: String| BackendError::Unavailable { name, why };
        let d = self.descriptor(kind).ok_or(BackendError::NotCompiled { kind })?;
        if options.disabled.contains(&kind) {
            return Err(unavailable(d.unavailable.to_string()));
        }
        match (d.count)(options) {
            Ok(0) => Err(unavailable(d.unavailable.to_string())),
            Ok(n) => Ok(n),
            Err(Unavailable(why)) => Err(unavailable(why)),
        }
    }

    /// Opens every device that the fence allows, most preferred first (priority, then ordinal).
    ///
    /// # Errors
    /// A *named* backend that is not available. A backend that nobody named is left out instead.
    pub fn open(&self, fence: &Fence, options: &OpenOptions) -> Result<Vec<Arc<dyn Device>>, BackendError> {
        for &name in fence.named() {
            self.check_named(name, options)?;
        }
        let mut preferred = self.descriptors.clone();
        preferred.sort_by_key(|d| (std::cmp::Reverse(d.priority), d.kind));
        let mut devices = Vec::new();
        for d in preferred {
            let count = match self.count(d.kind, options) {
                Ok(count) => count,
                Err(error) if d.kind == DeviceKind::Cpu => return Err(error),
                Err(_) => continue,
            };
            for ordinal in (0..count).filter(|&o| fence.allows(d.kind, o)) {
                match (d.open)(ordinal, options) {
                    Ok(device) => devices.push(device),
                    Err(Unavailable(why)) => self.tolerate(fence, d.kind, ordinal, why)?,
                }
            }
        }
        Ok(devices)
    }

    fn check_named(&self, name: BackendName, options: &OpenOptions) -> Result<(), BackendError> {
        let count = self.count(name.kind, options)?;
        match name.ordinal {
            Some(o) if o >= count => {
                let why = format!("this machine has {count} of them, numbered from 0");
                Err(BackendError::Unavailable { name, why })
            }
            _ => Ok(()),
        }
    }

    /// An instance that fails to open is an error if somebody named it, or if it is the CPU.
    fn tolerate(
        &self,
        fence: &Fence,
        kind: DeviceKind,
        ordinal: u16,
        why: String,
    ) -> Result<(), BackendError> {
        let named = fence.named().iter().any(|n| n.kind == kind && n.ordinal.is_none_or(|o| o == ordinal));
        if named || kind == DeviceKind::Cpu {
            let name = BackendName { kind, ordinal: (ordinal > 0).then_some(ordinal) };
            return Err(BackendError::Unavailable { name, why });
        }
        Ok(())
    }
}
