//! Reading rows by position, several at a time: a disk answers many small reads together much faster than
//! one after the other.

use std::fs::File;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::TablePart;
use crate::bytes::TensorBytes;
use crate::error::Error;
use crate::hf::Packed;

/// Rows that one reader takes at a time.
const BATCH: usize = 32;

/// Where a row lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) part: usize,
    pub(super) row: usize,
}

enum Source {
    File { path: PathBuf, file: File, offset: u64 },
    Bytes(TensorBytes),
    Packed(Packed),
}

struct Job {
    places: Vec<Place>,
    /// Which batch of the request this is.
    number: usize,
    reply: Sender<(usize, Result<Vec<u8>, Error>)>,
}

struct Shared {
    sources: Vec<Source>,
    row_bytes: usize,
}

/// A few threads that read.
pub(super) struct Readers {
    shared: Arc<Shared>,
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    pub(super) fn open(parts: Vec<TablePart>, row_bytes: usize, readers: usize) -> Result<Readers, Error> {
        let source = |part| match part {
            TablePart::Bytes(bytes) => Ok(Source::Bytes(bytes)),
            TablePart::Packed(packed) => Ok(Source::Packed(packed)),
            TablePart::File { path, offset, .. } => match File::open(&path) {
                Ok(file) => Ok(Source::File { path, file, offset }),
                Err(e) => Err(Error::io(&path, e)),
            },
        };
        let sources = parts.into_iter().map(source).collect::<Result<_, _>>()?;
        let shared = Arc::new(Shared { sources, row_bytes });
        let (jobs, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let mut threads = Vec::new();
        for _ in 0..readers {
            let (shared, queue) = (shared.clone(), queue.clone());
            let builder = std::thread::Builder::new().name("minfer-table".to_string());
            // Fewer readers, or none, only make it slower: the caller reads too.
            threads.extend(builder.spawn(move || serve(&shared, &queue)));
        }
        Ok(Readers { shared, jobs: Some(jobs), threads })
    }

    /// Begins to read rows. One row, or rows that no reader takes, are read when they are waited for.
    pub(super) fn start(&self, places: Vec<Place>) -> Reading {
        let batch = places.len().div_ceil(self.threads.len().max(1)).clamp(1, BATCH);
        let (reply, answers) = channel();
        let mut sent = 0;
        let jobs = self.jobs.as_ref().filter(|_| places.len() > 1 && !self.threads.is_empty());
        for (number, part) in jobs.iter().flat_map(|_| places.chunks(batch).enumerate()) {
            let job = Job { places: part.to_vec(), number, reply: reply.clone() };
            sent += usize::from(jobs.is_some_and(|jobs| jobs.send(job).is_ok()));
        }
        Reading { shared: self.shared.clone(), places, batch, sent, answers }
    }
}

/// Rows that are being read.
pub(super) struct Reading {
    shared: Arc<Shared>,
    places: Vec<Place>,
    batch: usize,
    /// Batches that readers have.
    sent: usize,
    answers: Receiver<(usize, Result<Vec<u8>, Error>)>,
}

impl Reading {
    /// The bytes of the rows, in their order.
    pub(super) fn wait(self) -> Result<Vec<u8>, Error> {
        let Reading { shared, places, batch, sent, answers } = self;
        let mut bytes = vec![0; places.len() * shared.row_bytes];
        let mut received = 0;
        for (number, result) in answers {
            let part = result?;
            let at = number * batch * shared.row_bytes;
            bytes[at..at + part.len()].copy_from_slice(&part);
            received += 1;
        }
        // A reader that died took its answer with it: read everything here.
        let all = sent > 0 && received == places.len().div_ceil(batch);
        if all { Ok(bytes) } else { shared.read(&places) }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(shared: &Shared, queue: &Mutex<Receiver<Job>>) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        let _ = job.reply.send((job.number, shared.read(&job.places)));
    }
}

impl Shared {
    fn read(&self, places: &[Place]) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; places.len() * self.row_bytes];
        for (row, place) in bytes.chunks_exact_mut(self.row_bytes).zip(places) {
            let start = place.row as u64 * self.row_bytes as u64;
            match &self.sources[place.part] {
                Source::File { path, file, offset } => {
                    read_at(file, row, offset.saturating_add(start)).map_err(|e| Error::io(path, e))?;
                }
                Source::Bytes(bytes) => {
                    let start = start as usize;
                    row.copy_from_slice(&bytes[start..start + self.row_bytes]);
                }
                Source::Packed(packed) => packed.unpack(place.row..place.row + 1, row)?,
            }
        }
        Ok(bytes)
    }
}

#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_at(file: &File, mut out: &mut [u8], mut offset: u64) -> std::io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => (out, offset) = (&mut out[n..], offset + n as u64),
        }
    }
    Ok(())
}
