//! The tensors that make up a weight, as bytes of its blocks.
//!
//! Most lie in a file as they are wanted; packs of Hugging Face directories are gathered when they are written to their
//! place, so that a stack of experts exists once in memory.

use minfer_format::bytes::AlignedBuf;
use minfer_format::hf::Packed;
use minfer_format::{Error, Reading, TensorBytes};

use crate::checkpoint::Checkpoint;
use crate::error::ModelError;

/// One tensor of a weight.
pub(crate) enum Part {
    /// Bytes of a file.
    Plain(TensorBytes),
    /// Blocks that are to be gathered.
    Packed(Packed),
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Part::Plain(bytes) => bytes.len(),
            Part::Packed(packed) => packed.bytes(),
        }
    }

    fn write(&self, out: &mut [u8]) -> Result<(), Error> {
        match self {
            Part::Plain(bytes) => out.copy_from_slice(bytes),
            Part::Packed(packed) => packed.unpack(0..packed.rows(), out)?,
        }
        Ok(())
    }

    /// The same, with what lies in a mapped file read into memory.
    fn read(&self, tensor: &str) -> Result<Part, Error> {
        Ok(match self {
            Part::Plain(bytes) => Part::Plain(bytes.read(tensor)?),
            Part::Packed(packed) => Part::Packed(packed.read()?),
        })
    }
}

impl Checkpoint {
    /// A tensor with rows of `k` numbers.
    pub(crate) fn part(&self, name: &str, k: usize) -> Result<Part, ModelError> {
        Ok(match self {
            Checkpoint::Gguf(g) => Part::Plain(g.data(name)?),
            Checkpoint::Hf(d) => match d.packed(name, k)? {
                Some(packed) => Part::Packed(packed),
                None => Part::Plain(d.data(name)?),
            },
            Checkpoint::Shape(_) => {
                return Err(ModelError::MissingTensor { source_name: self.name(), tensor: name.to_string() });
            }
        })
    }
}

/// All parts with their names, one after the other; a single one that lies in a mapped file may stay there.
pub(crate) fn join(parts: &[(&str, Part)], reading: Reading) -> Result<TensorBytes, Error> {
    if let [(name, Part::Plain(bytes))] = parts {
        return match reading {
            Reading::Mapped => Ok(bytes.clone()),
            Reading::Plain => bytes.read(name),
        };
    }
    let mut joined = AlignedBuf::zeroed(parts.iter().map(|(_, part)| part.len()).sum());
    let mut rest = &mut joined[..];
    for (name, part) in parts {
        let (place, after) = rest.split_at_mut(part.len());
        match reading {
            Reading::Mapped => part.write(place)?,
            Reading::Plain => part.read(name)?.write(place)?,
        }
        rest = after;
    }
    Ok(joined.into())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use minfer_format::{BlockType, decode_row};
    use minfer_graph::{HeadRows, WeightDecl, WeightMap};

    use super::*;

    /// The fixture of minfer-format: `NAME.weight` is quantised, `NAME.expected` the numbers that it stands for.
    fn fixture() -> Checkpoint {
        let path = "../format/tests/fixtures/packed";
        Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
    }

    fn numbers(ck: &Checkpoint, decl: &WeightDecl) -> Vec<f32> {
        let mut numbers = vec![0.0; decl.shape.iter().product()];
        decode_row(decl.ty, &ck.load(decl).unwrap(), &mut numbers).unwrap();
        numbers
    }

    fn expected(ck: &Checkpoint, name: &'static str, shape: &[usize]) -> Vec<f32> {
        numbers(ck, &ck.weight(("", name), None, "expected", shape).unwrap())
    }

    /// Reference: the fixture's numbers. Tolerance: none.
    #[test]
    fn packs_load_as_weights_and_join() {
        let ck = fixture();
        for (name, shape) in [("fp8_stack", &[3, 17, 96][..]), ("fp4", &[5, 96]), ("mxfp4", &[3, 64])] {
            let decl = ck.weight(("", name), None, "weight", shape).unwrap();
            assert_eq!(numbers(&ck, &decl), expected(&ck, name, shape), "{name}");
            assert_eq!(decl.bytes(), Some(ck.load(&decl).unwrap().len()), "{name}");
        }
        let parts = ["affine2", "affine3", "affine4"].map(|name| (("", name), "weight", 3));
        let joined = ck.joined(&parts, None, &[128]).unwrap();
        assert_eq!((joined.ty, &joined.shape[..]), (BlockType::AFFINE4, &[9, 128][..]));
        let all = parts.map(|(names, ..)| expected(&ck, names.1, &[3, 128])).concat();
        assert_eq!(numbers(&ck, &joined), all);
        let mixed = [(("", "affine4"), "weight", 3), (("", "affine8"), "weight", 3)];
        let error = ck.joined(&mixed, None, &[128]).unwrap_err().to_string();
        assert!(error.contains("affine4.weight is AFFINE4, but affine8.weight is AFFINE8"), "{error}");
    }

    /// Reference: the fixture's numbers, indexed here. Tolerance: none.
    #[test]
    fn packs_are_cut_by_heads_and_mapped() {
        let ck = fixture();
        for (name, heads, group, k) in [("fp8", 4, 5, 160), ("affine4", 1, 3, 128), ("affine8", 1, 3, 128)] {
            let all = expected(&ck, name, &[heads * group, k]);
            for transposed in [false, true] {
                let rows = HeadRows { group, from: 1, len: 2, transposed };
                let decl = ck.head_rows(("", name), None, [heads, k], rows).unwrap();
                let got = numbers(&ck, &decl);
                for (i, x) in got.iter().enumerate() {
                    let (head, i) = (i / (2 * k), i % (2 * k));
                    let (row, c) = if transposed { (i % 2, i / 2) } else { (i / k, i % k) };
                    assert_eq!(
                        *x,
                        all[(head * group + 1 + row) * k + c],
                        "{name}, {transposed}, {head}, {i}"
                    );
                }
            }
        }
        let decl = ck.mapped(("", "affine3"), None, "weight", &[3, 128], WeightMap::AddOne).unwrap();
        let plus_one: Vec<f32> = expected(&ck, "affine3", &[3, 128]).iter().map(|x| x + 1.0).collect();
        assert_eq!(numbers(&ck, &decl), plus_one);
    }

    /// Reference: the fixture's numbers. Tolerance: none.
    #[test]
    fn packs_are_tables() {
        let ck = fixture();
        let decl = ck.weight(("", "affine5"), None, "weight", &[3, 128]).unwrap();
        let table = ck.row_table(&decl, Default::default()).unwrap();
        let mut rows = Vec::new();
        table.read(&[2, 0], &mut rows).unwrap();
        let all = expected(&ck, "affine5", &[3, 128]);
        assert_eq!(rows, [&all[256..], &all[..128]].concat());
    }

    #[test]
    fn scales_of_packs_are_no_weights() {
        let ck = fixture();
        for name in ["fp8_e8m0", "fp4"] {
            assert!(ck.optional(("", name), None, "scale", &[1]).unwrap().is_none(), "{name}");
            assert!(!ck.has(("", name), None, "scale").unwrap());
            assert!(ck.has(("", name), None, "weight").unwrap());
        }
    }

    #[test]
    fn packs_of_other_sizes_are_refused() {
        let ck = fixture();
        for (name, shape, said) in [
            ("fp8", [20, 128], "shape [20, 160], expected [20, 128]"),
            ("fp4", [4, 96], "shape [5, 96], expected [4, 96]"),
            ("affine4", [3, 96], "does not hold 96 numbers a row"),
            ("affine4", [4, 128], "shape [3, 128], expected [4, 128]"),
        ] {
            let error = ck.weight(("", name), None, "weight", &shape).unwrap_err().to_string();
            assert!(error.contains(said) && error.contains(&format!("{name}.weight")), "{error}");
        }
        assert_eq!(ck.rows_of(("", "affine4")).unwrap(), 3);
    }
}
