//! Numbers the namespaces that have nodes, so that nodes stay small.

use std::collections::HashMap;

use crate::namespace::Namespace;

#[derive(Debug)]
struct NamespaceEntry {
    namespace: Namespace,
    nodes: u32,
}

/// Numbers of namespaces. The number is free again when the namespace loses its last node.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    numbers: HashMap<Namespace, u32>,
    entries: Vec<NamespaceEntry>,
    free: Vec<u32>,
}

impl Namespaces {
    pub(super) fn find(&self, namespace: &Namespace) -> Option<u32> {
        self.numbers.get(namespace).copied()
    }

    pub(super) fn get(&self, number: u32) -> &Namespace {
        &self.entries[number as usize].namespace
    }

    /// Returns the number of a namespace, and counts one more node in it.
    pub(super) fn add_node(&mut self, namespace: Namespace) -> u32 {
        let number = self.find(&namespace).unwrap_or_else(|| self.number(namespace));
        self.entries[number as usize].nodes += 1;
        number
    }

    pub(super) fn remove_node(&mut self, number: u32) {
        let entry = &mut self.entries[number as usize];
        entry.nodes -= 1;
        if entry.nodes == 0 {
            self.numbers.remove(&entry.namespace);
            self.free.push(number);
        }
    }

    fn number(&mut self, namespace: Namespace) -> u32 {
        let entry = NamespaceEntry { namespace, nodes: 0 };
        let number = match self.free.pop() {
            Some(number) => {
                self.entries[number as usize] = entry;
                number
            }
            None => {
                self.entries.push(entry);
                u32::try_from(self.entries.len() - 1).expect("fewer namespaces than nodes")
            }
        };
        self.numbers.insert(namespace, number);
        number
    }
}
