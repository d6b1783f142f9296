//! Opening an engine while a bar on stderr shows how far the weights are.

use std::fmt;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use minfer_engine::{Checkpoint, Engine, EngineError, EngineOptions};
use minfer_runtime::WeightOptions;

use crate::{units, weights};

/// Loading that is over sooner shows no bar, which would only flicker.
const PATIENCE: Duration = Duration::from_millis(300);

/// How weights came into memory.
#[derive(Clone, Copy)]
pub(crate) struct Loading {
    how: WeightOptions,
    /// Memory of their own that they take on all devices.
    pub(crate) bytes: u64,
    /// For everything that opening an engine takes.
    pub(crate) seconds: f64,
}

impl Loading {
    /// `repacked`, or what else was asked for.
    pub(crate) fn layout(&self) -> &'static str {
        if self.how.repack { "repacked" } else { "as in the file" }
    }
}

impl fmt::Display for Loading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let read = if self.how.mmap { "" } else { ", not mapped" };
        let lock = if self.how.lock { ", locked" } else { "" };
        let bytes = units::bytes(self.bytes);
        write!(f, "weights {}{read}{lock}: {bytes} of memory, loaded in {:.2} s", self.layout(), self.seconds)
    }
}

/// Opens an engine on devices that keep weights like `how`. The bar goes to stderr, and only if that is a terminal.
pub(crate) fn open_engine(
    model: &Checkpoint,
    options: EngineOptions,
    how: WeightOptions,
) -> Result<(Engine, Loading), EngineError> {
    let started = Instant::now();
    let mut bar: Option<ProgressBar> = None;
    let engine = Engine::open(model, options, &mut |done, total| {
        if started.elapsed() >= PATIENCE {
            let bar = bar.get_or_insert_with(|| ProgressBar::new(total).with_style(style()));
            bar.set_position(done);
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let engine = engine?;
    let bytes = (0..engine.placed().devices.len()).map(|d| weights::resident(engine.placed(), d)).sum();
    let seconds = started.elapsed().as_secs_f64();
    Ok((engine, Loading { how, bytes, seconds }))
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("loading {bar:30} {bytes} of {total_bytes}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
