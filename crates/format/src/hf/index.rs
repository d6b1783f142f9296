//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::error::{Error, shown};
use crate::limits;

use super::json;
use super::safetensors::Safetensors;

#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// The tensors of each shard; a shard's name is kept once, however many tensors it has.
struct WeightMap(BTreeMap<String, Vec<String>>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WeightMap, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
                let mut count = 0;
                while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
                    count += 1;
                    if count > limits::MAX_INDEX_TENSORS {
                        return Err(A::Error::custom(format_args!(
                            "more than {} tensors",
                            limits::MAX_INDEX_TENSORS
                        )));
                    }
                    shards.entry(shard).or_default().push(tensor);
                    if shards.len() > limits::MAX_SHARDS {
                        return Err(A::Error::custom(format_args!(
                            "more than {} shards",
                            limits::MAX_SHARDS
                        )));
                    }
                }
                Ok(WeightMap(shards))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// Opens every shard that the index names, and checks that each holds what the index says.
pub(super) fn open_shards(dir: &Path, index: &Path) -> Result<Vec<Safetensors>, Error> {
    let WeightMap(named) = json::read_typed::<Index>(index, limits::MAX_INDEX)?.weight_map;
    let mut shards = Vec::with_capacity(named.len());
    let mut tensors = 0;
    for (name, names) in &named {
        if !is_plain(name) {
            return Err(Error::ShardName { index: index.to_owned(), shard: shown(name) });
        }
        let path = dir.join(name);
        if !path.exists() {
            return Err(Error::MissingShard { index: index.to_owned(), shard: path });
        }
        let shard = Safetensors::open(&path)?;
        if let Some(tensor) = names.iter().find(|n| shard.tensor(n).is_none()) {
            return Err(Error::NotInShard { index: index.to_owned(), shard: path, tensor: shown(tensor) });
        }
        tensors += shard.tensors().len();
        if tensors > limits::MAX_INDEX_TENSORS {
            return Err(Error::Limit {
                file: index.to_owned(),
                what: "the number of tensors in its shards".to_owned(),
                found: tensors as u64,
                limit: limits::MAX_INDEX_TENSORS as u64,
            });
        }
        shards.push(shard);
    }
    Ok(shards)
}

/// Whether a shard's name stays inside the directory on every system.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', ':', '\0'])
}

/// `(shard, tensor in it)` of all tensors in the order of their names; none may occur in two shards.
pub(super) fn by_name(shards: &[Safetensors]) -> Result<Vec<(u32, u32)>, Error> {
    let name = |&(s, t): &(u32, u32)| shards[s as usize].tensors()[t as usize].name.as_str();
    let mut order: Vec<(u32, u32)> = (0u32..)
        .zip(shards)
        .flat_map(|(s, shard)| (0..shard.tensors().len() as u32).map(move |t| (s, t)))
        .collect();
    order.sort_by(|a, b| name(a).cmp(name(b)));
    match order.windows(2).find(|w| name(&w[0]) == name(&w[1])) {
        Some(twice) => {
            let [first, second] = [0, 1].map(|i| shards[twice[i].0 as usize].path().to_owned());
            Err(Error::InTwoFiles { first, second, tensor: shown(name(&twice[1])) })
        }
        None => Ok(order),
    }
}
