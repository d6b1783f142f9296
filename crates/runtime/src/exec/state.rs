//! State of an executor seen from outside: copying pages, and units on their way to the host and back.

use std::sync::Arc;

use minfer_graph::{DeviceId, StateId, StateKind};

use super::executor::{Executor, device_error};
use super::load::OpenState;
use crate::device::{DeviceError, StateBuffer, StateSpec};
use crate::error::RuntimeError;

impl Executor {
    /// Every piece of state that the graph uses, with the device that holds it, in the order of its ids.
    pub fn states(&self) -> impl Iterator<Item = (StateId, &StateSpec, DeviceId)> {
        let ids = (0..).map(StateId).zip(&self.states);
        let device = |s: &OpenState| self.placed.devices[s.device].id();
        ids.filter_map(move |(id, s)| s.as_ref().map(|s| (id, &s.spec, device(s))))
    }

    /// A piece of state as its device keeps it.
    pub fn state(&self, id: StateId) -> Option<&Arc<dyn StateBuffer>> {
        Some(&self.states.get(id.index())?.as_ref()?.buffer)
    }

    /// Copies page `from` over page `to` in every paged state that has such pages.
    ///
    /// # Errors
    /// A device that refuses; some states may have been copied.
    pub fn copy_page(&self, from: u32, to: u32) -> Result<(), RuntimeError> {
        for state in self.states.iter().flatten() {
            let StateKind::Paged { parts } = &state.spec.decl.kind else { continue };
            if parts.iter().any(|p| state.spec.part_pages(p).contains(&(from as usize))) {
                let copied = state.buffer.copy_page(from, to);
                copied.map_err(|e| self.state_error("copying a page of", state, e))?;
            }
        }
        Ok(())
    }

    /// Appends the first `rows` rows of a unit (a page, or a slot of recurrent state: one row) to `into`: as
    /// many bytes as [`StateSpec::unit_bytes`] says. Waits for the device.
    ///
    /// # Errors
    /// A unit that is not there, or a device that refuses or does not answer in time.
    pub fn read_state(
        &mut self,
        id: StateId,
        unit: u32,
        rows: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), RuntimeError> {
        let result = self.try_read_state(id, unit, rows, into);
        if result.is_err() {
            self.recover();
        }
        result
    }

    fn try_read_state(
        &self,
        id: StateId,
        unit: u32,
        rows: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), RuntimeError> {
        let state = self.open_state(id)?;
        let readback = state.buffer.read(unit, rows);
        let readback = readback.map_err(|e| self.state_error("reading", state, e))?;
        let bytes = readback.wait(self.options.wait_timeout);
        let bytes = bytes.map_err(|e| self.wait_error(&what("", state), state.device, e))?;
        if Some(bytes.len()) != state.spec.unit_bytes(unit, rows) {
            let text = format!("{} bytes of {rows} rows of{}", bytes.len(), what("", state));
            return Err(RuntimeError::Internal(text));
        }
        into.extend_from_slice(bytes);
        Ok(())
    }

    /// Writes what [`Executor::read_state`] gave, by the same kind of device and for the same declaration, into
    /// any unit. The next step sees it.
    ///
    /// # Errors
    /// A unit that is not there, a wrong number of bytes, or a device that refuses.
    pub fn write_state(
        &mut self,
        id: StateId,
        unit: u32,
        rows: usize,
        bytes: &[u8],
    ) -> Result<(), RuntimeError> {
        let state = self.open_state(id)?;
        let written = state.buffer.write(unit, rows, bytes);
        let written = written.map_err(|e| self.state_error("writing", state, e));
        if written.is_err() {
            self.recover();
        }
        written
    }

    fn open_state(&self, id: StateId) -> Result<&OpenState, RuntimeError> {
        let state = self.states.get(id.index()).and_then(Option::as_ref);
        state.ok_or_else(|| RuntimeError::Internal(format!("no node uses state {}", id.0)))
    }

    fn state_error(&self, doing: &str, state: &OpenState, source: DeviceError) -> RuntimeError {
        device_error(&what(doing, state), self.placed.devices[state.device].id(), source)
    }
}

fn what(doing: &str, state: &OpenState) -> String {
    format!("{doing} state '{}'", state.spec.decl.name)
}
