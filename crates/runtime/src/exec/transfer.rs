//! Two-phase copies between devices.
//!
//! *Enqueue* issues a copy on the source's stream behind its producer and returns a [`Transfer`], which can
//! be used once. *Arrive* consumes it at the consumer's first read. A split can be launched only with an
//! [`Arrived`], which only a completed wait produces: reading a value before its wait cannot be written down.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use minfer_graph::ValueId;

use crate::counters::Counters;
use crate::device::{Arena, DeviceError, ReadBack, Region, WaitError};
use crate::plan::Send;

/// A copy under way. Not `Clone`: it is consumed by its one wait.
#[must_use = "a transfer that nobody waits for is a value that nobody may read"]
pub(super) struct Transfer {
    readback: Arc<dyn ReadBack>,
    epoch: u64,
    source_is_async: bool,
    bytes: usize,
}

/// Proof that every value that a split receives has been waited for in this execution.
pub(super) struct Arrived {
    pub(super) epoch: u64,
}

/// Where a copy for a consumer stands within an execution; absent means never requested.
enum Slot {
    InFlight(Transfer),
    Ready,
}

/// The consumer's side of a copy.
pub(super) struct Destination<'a> {
    pub(super) arena: &'a dyn Arena,
    pub(super) region: Region,
    pub(super) is_async: bool,
}

/// The copies of one execution. A new execution starts from an empty table, whatever the last one left.
#[derive(Default)]
pub(super) struct Transfers {
    slots: BTreeMap<Send, Slot>,
    epoch: u64,
}

impl Transfers {
    /// Starts an execution.
    pub(super) fn begin(&mut self) {
        self.slots.clear();
        self.epoch += 1;
    }

    /// Issues a copy; a repeated request within an execution is the same copy.
    pub(super) fn enqueue(
        &mut self,
        send: Send,
        source: &dyn Arena,
        region: Region,
        source_is_async: bool,
        counters: &mut Counters,
    ) -> Result<(), DeviceError> {
        if self.slots.contains_key(&send) {
            return Ok(());
        }
        let readback = source.read(region)?;
        let transfer = Transfer { readback, epoch: self.epoch, source_is_async, bytes: region.bytes };
        self.slots.insert(send, Slot::InFlight(transfer));
        counters.copies += 1;
        counters.async_copies += u64::from(source_is_async);
        let in_flight = self.slots.values().filter(|s| matches!(s, Slot::InFlight(_))).count() as u64;
        counters.in_flight_peak = counters.in_flight_peak.max(in_flight);
        Ok(())
    }

    /// Waits for a value at its consumer, once; later calls find it there. `deferred` says whether this is
    /// the consumer's first read.
    pub(super) fn arrive(
        &mut self,
        send: Send,
        to: &Destination<'_>,
        timeout: Duration,
        deferred: bool,
        counters: &mut Counters,
    ) -> Result<(), WaitError> {
        if let Some(Slot::Ready) = self.slots.get(&send) {
            return Ok(());
        }
        let transfer = match self.slots.remove(&send) {
            Some(Slot::InFlight(t)) if t.epoch == self.epoch => t,
            _ => return Err(never_sent(send.value).into()),
        };
        counters.waits += 1;
        counters.deferred_waits += u64::from(deferred);
        match (transfer.source_is_async, to.is_async) {
            (true, true) => counters.stream_waits += 1,
            (true, false) => counters.event_syncs += 1,
            _ => {}
        }
        to.arena.receive(to.region.offset, transfer.bytes, transfer.readback, timeout)?;
        self.slots.insert(send, Slot::Ready);
        Ok(())
    }

    /// The proof that lets a split launch, after [`Transfers::arrive`] for each value that it receives.
    pub(super) fn arrived(&self, receives: impl Iterator<Item = Send>) -> Result<Arrived, WaitError> {
        for send in receives {
            if !matches!(self.slots.get(&send), Some(Slot::Ready)) {
                return Err(never_sent(send.value).into());
            }
        }
        Ok(Arrived { epoch: self.epoch })
    }

    /// The current execution.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Copies that nobody has waited for yet.
    pub(super) fn in_flight(&self) -> Vec<Send> {
        let pending = self.slots.iter().filter(|(_, s)| matches!(s, Slot::InFlight(_)));
        pending.map(|(&send, _)| send).collect()
    }
}

fn never_sent(value: ValueId) -> DeviceError {
    DeviceError::Failed(format!("value {} was read without having been sent in this step", value.0))
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::sync::Mutex;

    use super::*;

    const VALUE: ValueId = ValueId(7);
    const REGION: Region = Region { offset: 4, bytes: 2 };
    const LONG: Duration = Duration::from_secs(60);

    struct Bytes(Vec<u8>);

    impl ReadBack for Bytes {
        fn wait(&self, _: Duration) -> Result<&[u8], WaitError> {
            Ok(&self.0)
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    /// Memory that finishes everything at once, and refuses to receive when `full`.
    struct Host {
        memory: Mutex<Vec<u8>>,
        full: bool,
    }

    fn host(memory: &[u8]) -> Host {
        Host { memory: Mutex::new(memory.to_vec()), full: false }
    }

    impl Arena for Host {
        fn bytes(&self) -> usize {
            self.memory.lock().unwrap().len()
        }

        fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
            self.memory.lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
            Ok(())
        }

        fn read(&self, r: Region) -> Result<Arc<dyn ReadBack>, DeviceError> {
            Ok(Arc::new(Bytes(self.memory.lock().unwrap()[r.offset..r.offset + r.bytes].to_vec())))
        }

        fn receive(
            &self,
            offset: usize,
            len: usize,
            source: Arc<dyn ReadBack>,
            timeout: Duration,
        ) -> Result<(), WaitError> {
            if self.full {
                return Err(DeviceError::Failed("full".to_string()).into());
            }
            Ok(self.write(offset, &source.wait(timeout)?[..len])?)
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn to(arena: &Host, is_async: bool) -> Destination<'_> {
        Destination { arena, region: Region { offset: 0, bytes: 2 }, is_async }
    }

    fn send(to: usize) -> Send {
        Send { value: VALUE, to }
    }

    fn started() -> Transfers {
        let mut transfers = Transfers::default();
        transfers.begin();
        transfers
    }

    #[test]
    fn a_repeated_request_while_pending_is_one_copy() {
        let (mut t, mut c, source) = (started(), Counters::default(), host(&[1, 2, 3, 4, 5, 6]));
        t.enqueue(send(1), &source, REGION, true, &mut c).unwrap();
        source.write(4, &[9, 9]).unwrap();
        t.enqueue(send(1), &source, REGION, true, &mut c).unwrap();
        assert_eq!((c.copies, c.async_copies, c.in_flight_peak), (1, 1, 1));
        let sink = host(&[0, 0]);
        t.arrive(send(1), &to(&sink, false), LONG, true, &mut c).unwrap();
        assert_eq!(*sink.memory.lock().unwrap(), [5, 6], "the first request's bytes");
        t.enqueue(send(1), &source, REGION, true, &mut c).unwrap();
        assert_eq!(c.copies, 1, "a value that is there is not sent again in this execution");
    }

    #[test]
    fn each_destination_is_a_copy_of_its_own() {
        let (mut t, mut c, source) = (started(), Counters::default(), host(&[0; 6]));
        for device in [0, 2, 3] {
            t.enqueue(send(device), &source, REGION, false, &mut c).unwrap();
        }
        assert_eq!((c.copies, c.async_copies, c.in_flight_peak), (3, 0, 3));
        assert_eq!(t.in_flight(), [send(0), send(2), send(3)]);
    }

    #[test]
    fn a_copy_is_waited_for_once() {
        let (mut t, mut c, source) = (started(), Counters::default(), host(&[0; 6]));
        t.enqueue(send(1), &source, REGION, true, &mut c).unwrap();
        let sink = host(&[0, 0]);
        for _ in 0..3 {
            t.arrive(send(1), &to(&sink, false), LONG, true, &mut c).unwrap();
        }
        assert_eq!((c.waits, c.deferred_waits, c.event_syncs), (1, 1, 1));
    }

    #[test]
    fn draining_waits_for_what_nobody_read_and_counts_no_deferred_wait() {
        let (mut t, mut c, source, sink) = (started(), Counters::default(), host(&[0; 6]), host(&[0, 0]));
        t.enqueue(send(1), &source, REGION, true, &mut c).unwrap();
        t.enqueue(send(2), &source, REGION, true, &mut c).unwrap();
        t.arrive(send(1), &to(&sink, true), LONG, true, &mut c).unwrap();
        for _ in 0..2 {
            for pending in t.in_flight() {
                t.arrive(pending, &to(&sink, false), LONG, false, &mut c).unwrap();
            }
            assert!(t.in_flight().is_empty());
        }
        assert_eq!((c.copies, c.waits, c.deferred_waits), (2, 2, 1));
        assert_eq!((c.stream_waits, c.event_syncs), (1, 1));
    }

    #[test]
    fn no_proof_without_a_finished_wait() {
        let (mut t, mut c, source) = (started(), Counters::default(), host(&[0; 6]));
        let refused = |t: &Transfers| t.arrived([send(1)].into_iter()).err().map(|e| e.to_string());
        let text = "value 7 was read without having been sent in this step";
        assert_eq!(refused(&t).as_deref(), Some(text), "never sent");
        t.enqueue(send(1), &source, REGION, true, &mut c).unwrap();
        assert_eq!(refused(&t).as_deref(), Some(text), "sent, not waited for");
        let full = Host { full: true, ..host(&[0, 0]) };
        t.arrive(send(1), &to(&full, false), LONG, true, &mut c).unwrap_err();
        assert_eq!(refused(&t).as_deref(), Some(text), "the wait failed");
        assert!(t.arrive(send(1), &to(&host(&[0, 0]), false), LONG, true, &mut c).is_err(), "used up");
        assert!(t.arrived(std::iter::empty()).is_ok());
    }

    #[test]
    fn an_execution_starts_without_what_the_last_one_left() {
        let (mut t, mut c, source, sink) = (started(), Counters::default(), host(&[0; 6]), host(&[0, 0]));
        t.enqueue(send(1), &source, REGION, true, &mut c).unwrap();
        t.enqueue(send(2), &source, REGION, true, &mut c).unwrap();
        t.arrive(send(2), &to(&sink, false), LONG, true, &mut c).unwrap();
        let before = t.epoch();
        t.begin();
        assert_ne!(t.epoch(), before);
        assert!(t.in_flight().is_empty());
        for stale in [send(1), send(2)] {
            assert!(t.arrived([stale].into_iter()).is_err());
            assert!(t.arrive(stale, &to(&sink, false), LONG, true, &mut c).is_err());
        }
        t.enqueue(send(1), &source, REGION, true, &mut c).unwrap();
        assert_eq!(c.copies, 3, "a new copy, not the old one");
        t.arrive(send(1), &to(&sink, false), LONG, true, &mut c).unwrap();
        assert_eq!(t.arrived([send(1)].into_iter()).unwrap().epoch, t.epoch());
    }
}
