//! Compares the devices of executors with the machine's NUMA nodes.

use std::{fs, path::Path};

use settings::CoreList;

use crate::{deployment::config::DeploymentConfig, terminal::findings::Finding};

/// Directory in which Linux lists the nodes.
pub(super) const NODES: &str = "/sys/devices/system/node";

const NAME: &str = "NUMA nodes";

/// Returns the cores of each NUMA node that has some, in the order of the nodes.
pub(super) fn nodes(directory: &Path) -> Vec<CoreList> {
    let number = |entry: fs::DirEntry| {
        entry.file_name().to_str()?.strip_prefix("node").and_then(|number| number.parse::<u32>().ok())
    };
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> = entries.filter_map(number).collect();
    numbers.sort_unstable();
    let cores = |number: u32| {
        let list = fs::read_to_string(directory.join(format!("node{number}/cpulist"))).ok()?;
        list.trim().parse().ok()
    };
    numbers.into_iter().filter_map(cores).collect()
}

/// Checks that each device has cores of one node, and names the setting that uses the memory of all nodes.
/// `None` on a machine with one node.
pub(super) fn finding(config: &DeploymentConfig, nodes: &[CoreList]) -> Option<Finding> {
    if nodes.len() < 2 {
        return None;
    }
    let found = format!("{}, with the cores {}", nodes.len(), listed(nodes, " and "));
    let Some(group) = &config.executor.devices else {
        let setting = listed(nodes, "\", \"cpu:");
        return Some(Finding::ok(
            NAME,
            format!(
                "{found}; devices = [\"cpu:{setting}\"] in [executor] puts a part of the weights on each"
            ),
        ));
    };
    let of_several =
        |cores: &&CoreList| nodes.iter().filter(|node| !node.0.is_disjoint(&cores.0)).count() > 1;
    Some(match group.devices().iter().find(of_several) {
        None => Finding::ok(NAME, found),
        Some(device) => Finding::warn(
            NAME,
            format!("{found}; the device cpu:{device} has cores of several"),
            "give each device of [executor].devices cores of one node",
        ),
    })
}

fn listed(nodes: &[CoreList], between: &str) -> String {
    nodes.iter().map(CoreList::to_string).collect::<Vec<_>>().join(between)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(devices: &str, nodes: &[&str]) -> Option<String> {
        let config: DeploymentConfig = toml::from_str(devices).unwrap();
        let nodes: Vec<CoreList> = nodes.iter().map(|cores| cores.parse().unwrap()).collect();
        finding(&config, &nodes).map(|finding| finding.found)
    }

    #[test]
    fn nodes_are_read_in_their_order_and_those_without_cores_are_left_out() {
        let directory = tempfile::tempdir().unwrap();
        for (node, cores) in [("node1", "4-7\n"), ("node10", "8\n"), ("node0", "0-3\n"), ("node2", "\n")] {
            fs::create_dir(directory.path().join(node)).unwrap();
            fs::write(directory.path().join(node).join("cpulist"), cores).unwrap();
        }
        fs::write(directory.path().join("online"), "0-2").unwrap();
        let read: Vec<String> = nodes(directory.path()).iter().map(CoreList::to_string).collect();
        assert_eq!(read, ["0-3", "4-7", "8"]);
        assert!(nodes(Path::new("/no/such/directory")).is_empty());
    }

    #[test]
    fn a_machine_with_several_nodes_is_told_how_to_use_all_of_them() {
        assert_eq!(found("", &["0-7"]), None);
        let advice = found("", &["0-3", "4-7"]).unwrap();
        assert!(advice.contains("devices = [\"cpu:0-3\", \"cpu:4-7\"]"), "{advice}");
        let right = found("executor.devices = ['cpu:0-3', 'cpu:4-7']", &["0-3", "4-7"]).unwrap();
        assert_eq!(right, "2, with the cores 0-3 and 4-7");
        let wrong = found("executor.devices = ['cpu:0-1,4-5', 'cpu:2-3,6-7']", &["0-3", "4-7"]).unwrap();
        assert!(wrong.contains("the device cpu:0-1,4-5 has cores of several"), "{wrong}");
    }
}
