//! Where workers must meet: before a step that touches memory or state which another worker may have touched
//! since the last meeting, one of the two writing.

use minfer_graph::{Node, Op, StateId, ValueId};
use minfer_runtime::{DeviceError, ProgramSpec, Region};

use super::compile::region;
use super::rows::is_row_op;

/// What was touched since the workers last met.
#[derive(Default)]
pub(super) struct Meetings {
    values: Vec<Touch>,
    states: Vec<StateTouch>,
}

struct Touch {
    value: ValueId,
    region: Region,
    written: bool,
    by_row: bool,
}

struct StateTouch {
    state: StateId,
    written: bool,
    by_row: bool,
}

impl Meetings {
    /// Whether workers must meet before `node`; remembers what it touches.
    pub(super) fn needed_before(&mut self, spec: &ProgramSpec<'_>, node: &Node) -> Result<bool, DeviceError> {
        let by_row = is_row_op(&node.op);
        let mut values = Vec::new();
        for (of_node, written) in [(&node.inputs, false), (&node.outputs, true)] {
            for &value in of_node {
                values.push(Touch { value, region: region(spec, value)?, written, by_row });
            }
        }
        let state = node.state.map(|state| StateTouch { state, written: writes_state(&node.op), by_row });
        let barrier = values.iter().any(|t| self.values.iter().any(|earlier| conflict(earlier, t)))
            || state.iter().any(|t| self.states.iter().any(|earlier| state_conflict(earlier, t)));
        if barrier {
            self.values.clear();
            self.states.clear();
        }
        self.values.extend(values);
        self.states.extend(state);
        Ok(barrier)
    }
}

/// Two touches of the same bytes, one of them a write, by workers that may differ. Row steps give a worker
/// the same rows of a value each time.
fn conflict(a: &Touch, b: &Touch) -> bool {
    let same_rows = a.value == b.value && a.by_row && b.by_row;
    (a.written || b.written) && a.region.overlaps(&b.region) && !same_rows
}

/// The same for state: a row step touches its own slot only, every other step those of other rows too.
fn state_conflict(a: &StateTouch, b: &StateTouch) -> bool {
    (a.written || b.written) && a.state == b.state && !(a.by_row && b.by_row)
}

/// Whether an op with state changes it.
fn writes_state(op: &Op) -> bool {
    !matches!(op, Op::Attend(_) | Op::AttendBlocks(_) | Op::AttendWindow(_) | Op::IndexSelect(_))
}
