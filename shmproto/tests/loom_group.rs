//! Every interleaving of a device group's operations, with one and two members.
//!
//! `scripts/sanitize loom` runs these tests; without `--cfg loom` the file is empty. A lost wake-up is a
//! deadlock, which loom reports, because its futex has no timeout.
#![cfg(loom)]

use std::time::Duration;

use loom::thread;
use shmproto::{
    group::{CallsOfMember, GroupCall, GroupGeometry, GroupLeader, GroupMember, GroupWork, InputForm},
    layer::{SiteOp, SitePath},
};

fn group(members: u32) -> (GroupLeader, Vec<GroupMember>) {
    GroupLeader::in_process(GroupGeometry { members, input_values: 16, output_values: 16 }, Duration::ZERO)
        .unwrap()
}

fn call(op: SiteOp, after: Option<CallsOfMember>) -> GroupCall {
    let work = GroupWork::Evaluate { part: None, op, path: SitePath::Fast };
    GroupCall { site: 0, work, rows: 1, form: InputForm::F32, input: 0, output: 0, after }
}

/// Tries every schedule with at most `preemptions` preemptions.
fn check(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_branches = 20_000;
    model.check(test);
}

/// Doubles the inputs of every call until the group ends.
fn double(mut member: GroupMember) {
    while member.next_call().unwrap().is_some() {
        let mut row = [0.0; 2];
        member.read_inputs(0, &mut row).unwrap();
        member.outputs_mut(0, 2).unwrap().copy_from_slice(&row.map(|x| 2.0 * x));
        member.finish();
    }
}

/// Adds one to the sums of every call until the group ends.
fn add_one(mut member: GroupMember) {
    while member.next_call().unwrap().is_some() {
        let mut sums = [0.0; 2];
        member.read_inputs(0, &mut sums).unwrap();
        member.write_inputs(0, &sums.map(|x| 2.0 * x + 1.0)).unwrap();
        member.finish();
    }
}

#[test]
fn a_call_is_answered_with_the_outputs_of_its_inputs_and_the_end_is_seen() {
    check(3, || {
        let (mut leader, mut members) = group(1);
        let member = members.pop().unwrap();
        let thread = thread::spawn(move || double(member));
        for value in [1.0, 5.0] {
            leader.write_inputs(0, &[value, 3.0]);
            let posted = leader.post(0, &call(SiteOp::Forward, None));
            leader.wait(posted);
            let mut row = [0.0; 2];
            leader.read_outputs(0, 0, &mut row);
            assert_eq!(row, [2.0 * value, 6.0]);
        }
        drop(leader);
        thread.join().unwrap();
    });
}

#[test]
fn sums_pass_from_member_to_member_in_order() {
    check(2, || {
        let (mut leader, members) = group(2);
        let threads: Vec<_> =
            members.into_iter().map(|member| thread::spawn(move || add_one(member))).collect();
        leader.write_inputs(0, &[1.0, 2.0]);
        let first = leader.post(0, &call(SiteOp::Backward, None));
        let second = leader.post(1, &call(SiteOp::Backward, Some(first)));
        leader.wait(second);
        let mut sums = [0.0; 2];
        leader.read_inputs(0, &mut sums);
        assert_eq!(sums, [7.0, 11.0]);
        leader.wait(first);
        drop(leader);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
