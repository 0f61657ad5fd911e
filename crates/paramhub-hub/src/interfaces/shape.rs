//! This module plans which cores and processors serve each interface, computes the hub's shape for the
//! placement, and describes the plan for people.

use paramhub_core::placement::{HubShape, InterfaceShape};
use paramhub_transport::interface::Sysfs;

use super::Listening;
use super::assign::{Assignment, Demand, assign, processors};
use crate::config::{HubConfig, HubError};

/// Assigns cores to each interface, and to each core a processor, of the interface's NUMA node if there is
/// one.
pub(crate) fn plan(listening: &[Listening], cores: usize, sysfs: &Sysfs) -> Result<Assignment, HubError> {
    let processors = processors(sysfs)
        .map_err(|cause| HubError::System { what: "learn which processors it may use", cause })?;
    let demand = |listening: &Listening| Demand { weight: listening.weight, node: listening.node };
    let demands: Vec<Demand> = listening.iter().map(demand).collect();
    Ok(assign(&demands, cores, &processors))
}

/// Builds the hub's shape, which has no local socket yet. It lists each interface once per stream, one copy
/// after the other, so that the placement spreads chunks over the streams as it does over interfaces.
///
/// # Errors
/// [`HubError::Config`] if workers cannot dial an address and the configuration names no other for it.
pub(crate) fn shape(
    config: &HubConfig,
    listening: &[Listening],
    assignment: &Assignment,
) -> Result<HubShape, HubError> {
    let address_of = |number: usize| match (config.advertise.get(number), listening[number].address) {
        (Some(advertised), _) => Ok(advertised.clone()),
        (None, address) if address.ip().is_unspecified() => Err(HubError::Config(format!(
            "{address} is no address that workers can dial: listen on the address of an interface, or say what to dial with \
             --advertise"
        ))),
        (None, address) => Ok(address.to_string()),
    };
    let interface_shape = |number: usize| {
        // The copies divide the interface's weight, its known or assumed rate in Mbit/s, among them, so that
        // the weights of hubs with different numbers of streams are comparable.
        let weight = (listening[number].weight / config.streams as u32).max(1);
        let cores = assignment.cores_of[number].clone();
        Ok(InterfaceShape { address: address_of(number)?, cores, weight })
    };
    let copies = (0..listening.len()).flat_map(|number| std::iter::repeat_n(number, config.streams));
    Ok(HubShape {
        interfaces: copies.map(interface_shape).collect::<Result<_, HubError>>()?,
        local: None,
        between_hubs: None,
    })
}

/// Describes each interface on one line: its name, address, rate, weight, NUMA node, cores and processors.
pub(crate) fn describe(listening: &[Listening], assignment: &Assignment, is_pinned: bool) -> Vec<String> {
    let line = |(listening, cores): (&Listening, &Vec<u16>)| {
        let rate = match listening.rate {
            Some(rate) => rate.to_string(),
            None => "unknown rate".into(),
        };
        let node = listening.node.map_or("no known node".into(), |node| format!("node {node}"));
        let processors: Vec<String> = cores
            .iter()
            .map(|&core| {
                let processor = assignment.processor_of[usize::from(core)];
                match (listening.node, processor.node) {
                    (Some(interface_node), Some(core_node)) if interface_node != core_node => {
                        format!("{} of node {core_node}", processor.number)
                    }
                    _ => processor.number.to_string(),
                }
            })
            .collect();
        let cores: Vec<String> = cores.iter().map(ToString::to_string).collect();
        let pinned = match is_pinned {
            true => format!("on processors {}", processors.join(", ")),
            false => "on any processor".into(),
        };
        format!(
            "interface {}: {rate}, weight {}, {node}, cores {} {pinned}",
            listening.called(),
            listening.weight,
            cores.join(", ")
        )
    };
    listening.iter().zip(&assignment.cores_of).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::super::assign::Processor;
    use super::*;

    fn listening(address: &str, name: &str, node: Option<u32>) -> Listening {
        let address = address.parse().unwrap();
        Listening { address, name: Some(name.into()), rate: "25gbit".parse().ok(), weight: 25_000, node }
    }

    #[test]
    fn people_read_what_was_tied_together() {
        let all = [listening("10.0.0.7:1", "eth0", Some(0)), listening("10.0.1.7:1", "eth1", None)];
        let assignment = Assignment {
            cores_of: vec![vec![0, 2], vec![1]],
            processor_of: [(4, 0), (5, 0), (8, 1)]
                .map(|(number, node)| Processor { number, node: Some(node) })
                .to_vec(),
        };
        assert_eq!(
            describe(&all, &assignment, true),
            [
                "interface eth0 (10.0.0.7:1): 25gbit, weight 25000, node 0, cores 0, 2 on processors 4, 8 of node 1",
                "interface eth1 (10.0.1.7:1): 25gbit, weight 25000, no known node, cores 1 on processors 5"
            ]
        );
        assert!(describe(&all, &assignment, false)[1].ends_with("cores 1 on any processor"));
        let config = HubConfig { streams: 2, ..HubConfig::default() };
        let shape = shape(&config, &all, &assignment).unwrap();
        let seen: Vec<(&str, u32, usize)> =
            shape.interfaces.iter().map(|i| (i.address.as_str(), i.weight, i.cores.len())).collect();
        assert_eq!(
            seen,
            [
                ("10.0.0.7:1", 12_500, 2),
                ("10.0.0.7:1", 12_500, 2),
                ("10.0.1.7:1", 12_500, 1),
                ("10.0.1.7:1", 12_500, 1)
            ]
        );
    }
}
