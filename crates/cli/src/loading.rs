//! Opening an engine while a bar on stderr shows how far the weights are.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use minfer_engine::{Checkpoint, Engine, EngineError, EngineOptions};

/// Loading that is over sooner shows no bar, which would only flicker.
const PATIENCE: Duration = Duration::from_millis(300);

/// Opens an engine. The bar goes to stderr, and only if that is a terminal.
pub(crate) fn open_engine(model: &Checkpoint, options: EngineOptions) -> Result<Engine, EngineError> {
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
    engine
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("loading {bar:30} {bytes} of {total_bytes}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
