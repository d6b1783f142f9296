//! The graph as DOT (for Graphviz) and as JSON (for tools), with ids, names, shapes and places.

use std::fmt::Write;

use serde_json::{Value as Json, json};

use crate::graph::{Graph, Node, ValueId};
use crate::op::Op;

impl Graph {
    /// Graphviz source: one box per node, one edge per value, weights and states in the labels.
    pub fn to_dot(&self) -> String {
        let mut dot =
            String::from("digraph minfer {\n  rankdir=TB; node [shape=box, fontname=\"monospace\"];\n");
        for input in &self.inputs {
            let label = format!("{}\\n{}", input.name, self.ty(input.value));
            let _ = writeln!(dot, "  v{} [shape=ellipse, label=\"{}\"];", input.value.0, label);
        }
        let mut from: Vec<String> = (0..self.values.len()).map(|v| format!("v{v}")).collect();
        for (id, node) in self.nodes() {
            let _ = writeln!(dot, "  n{} [label=\"{}\"];", id.0, self.dot_label(id.index(), node));
            for v in &node.inputs {
                let ty = self.ty(*v);
                let _ = writeln!(dot, "  {} -> n{} [label=\"{}\"];", from[v.index()], id.0, ty);
            }
            for v in &node.outputs {
                from[v.index()] = format!("n{}", id.0);
            }
        }
        for (i, output) in self.outputs.iter().enumerate() {
            let _ = writeln!(dot, "  o{i} [shape=ellipse, label=\"{}\"];", output.name);
            let _ = writeln!(dot, "  {} -> o{i};", from[output.value.index()]);
        }
        dot.push_str("}\n");
        dot
    }

    fn dot_label(&self, id: usize, node: &Node) -> String {
        let mut label = format!("{id} {}", node.op.name());
        if let Some(layer) = node.layer {
            let _ = write!(label, " @{layer}");
        }
        if let Some(w) = node.weight {
            let w = &self.weights[w.index()];
            let _ = write!(label, "\\n{} {} {:?}", escape(&w.name), w.ty, w.shape);
        }
        if let Some(s) = node.state {
            let _ = write!(label, "\\nstate {}", escape(&self.states[s.index()].name));
        }
        if let Some(place) = node.place {
            let _ = write!(label, "\\non {place}");
        }
        label
    }

    /// A JSON document `{format, version, inputs, outputs, weights, states, nodes}`.
    pub fn to_json(&self) -> Json {
        let named =
            |name: &str, v: ValueId| json!({"name": name, "value": v.0, "type": self.ty(v).to_string()});
        json!({
            "format": "minfer-graph",
            "version": 1,
            "inputs": self.inputs.iter().map(|i| named(i.name, i.value)).collect::<Vec<_>>(),
            "outputs": self.outputs.iter().map(|o| named(o.name, o.value)).collect::<Vec<_>>(),
            "weights": self.weights.iter().map(|w| json!({
                "name": w.name, "type": w.ty.name(), "shape": w.shape, "tensors": w.tensors,
            })).collect::<Vec<_>>(),
            "states": self.states.iter().map(|s| json!({
                "name": s.name, "layer": s.layer, "kind": s.kind.to_string(),
            })).collect::<Vec<_>>(),
            "nodes": self.nodes().map(|(id, n)| self.node_json(id.index(), n)).collect::<Vec<_>>(),
        })
    }

    fn node_json(&self, id: usize, node: &Node) -> Json {
        let list = |ids: &[ValueId]| {
            ids.iter()
                .map(|&v| {
                    let value = &self.values[v.index()];
                    json!({"value": v.0, "name": value.name, "type": value.ty.to_string()})
                })
                .collect::<Vec<_>>()
        };
        json!({
            "id": id,
            "op": node.op.name(),
            "payload": payload(&node.op),
            "inputs": list(&node.inputs),
            "outputs": list(&node.outputs),
            "weight": node.weight.map(|w| w.0),
            "state": node.state.map(|s| s.0),
            "layer": node.layer,
            "place": node.place.map(|p| json!({
                "device": p.to_string(), "kind": p.kind.number(), "ordinal": p.ordinal,
            })),
        })
    }
}

fn payload(op: &Op) -> Json {
    match op {
        Op::RmsNorm(n) | Op::UnitNorm(n) | Op::LayerNorm(n) | Op::RmsNormQuantize(n) | Op::AddRmsNorm(n) => {
            json!({"eps": n.eps, "group": n.group})
        }
        Op::RopeTable(t) => json!({
            "inv_freq": t.inv_freq.to_vec(), "attention_factor": t.attention_factor,
        }),
        Op::Rope(r) => json!({"style": format!("{:?}", r.style), "head_dim": r.head_dim}),
        Op::Attend(a) => json!({
            "heads": a.heads, "kv_heads": a.kv_heads, "scale": a.scale, "v_part": a.v_part,
        }),
        Op::Router(r) => json!({
            "scoring": format!("{:?}", r.scoring), "top_k": r.top_k, "renormalise": r.renormalise,
            "biased": r.biased, "scale": r.scale,
        }),
        Op::Act(_)
        | Op::Clamp(_)
        | Op::HyperMix(_)
        | Op::PoolGated(_)
        | Op::StreamWeightedSum(_)
        | Op::StreamMix(_)
        | Op::RopeTail(_)
        | Op::Compress(_)
        | Op::WindowStart(_)
        | Op::StorePart(_)
        | Op::AttendWindow(_)
        | Op::ExpertWeights(_)
        | Op::RoundTrip(_)
        | Op::Slice(_)
        | Op::Reshape(_)
        | Op::Repeat(_)
        | Op::StreamSum(_)
        | Op::StreamDot(_)
        | Op::StreamMul(_)
        | Op::StreamAdd(_)
        | Op::Conv1d(_)
        | Op::DeltaRule(_)
        | Op::PoolKeys(_)
        | Op::IndexSelect(_)
        | Op::AttendBlocks(_) => json!(format!("{op:?}")),
        _ => Json::Null,
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}
