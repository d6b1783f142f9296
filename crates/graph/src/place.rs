//! Names and numbers of device kinds, and the identity of a device instance.

use std::fmt;

/// A kind of device. The number is written into files and exports: numbers are appended, never reused,
/// and are the same on every build, whether or not the kind is compiled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
#[allow(missing_docs)]
pub enum DeviceKind {
    Cpu = 0,
    Metal = 1,
    Cuda = 2,
    Vulkan = 3,
}

impl DeviceKind {
    /// Every known kind in identity order.
    pub const ALL: [DeviceKind; 4] =
        [DeviceKind::Cpu, DeviceKind::Metal, DeviceKind::Cuda, DeviceKind::Vulkan];

    /// The number in files.
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// The kind with this number.
    pub fn from_number(number: u16) -> Option<DeviceKind> {
        DeviceKind::ALL.into_iter().find(|k| k.number() == number)
    }

    /// Canonical lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Metal => "metal",
            DeviceKind::Cuda => "cuda",
            DeviceKind::Vulkan => "vulkan",
        }
    }

    /// Parses a name, trimmed and in any case.
    pub fn from_name(name: &str) -> Option<DeviceKind> {
        let name = name.trim();
        DeviceKind::ALL.into_iter().find(|k| k.name().eq_ignore_ascii_case(name))
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One device of a machine: two GPUs are two instances of one kind. The order is the identity order;
/// assignment preference is a priority on the device's descriptor and never mixed up with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    /// What it is.
    pub kind: DeviceKind,
    /// Which one of its kind, from 0.
    pub ordinal: u16,
}

impl DeviceId {
    /// The host's processor.
    pub const CPU: DeviceId = DeviceId { kind: DeviceKind::Cpu, ordinal: 0 };

    /// The instance `ordinal` of `kind`.
    pub const fn new(kind: DeviceKind, ordinal: u16) -> DeviceId {
        DeviceId { kind, ordinal }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ordinal {
            0 => f.write_str(self.kind.name()),
            n => write!(f, "{}:{n}", self.kind),
        }
    }
}
