//! A device group over a real region: calls, limits, and a leader that writes anything.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a group that cannot be set up has failed")]

use std::{os::fd::OwnedFd, thread, time::Duration};

use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use shmproto::{
    group::{
        DEPTH, GroupCall, GroupError, GroupGeometry, GroupLeader, GroupMember, GroupViolation, GroupWork,
        InputForm, JoinGroupError, LAYOUT_HASH, MemberOutputs, WeightSplit,
        startup::{
            FromMember, GroupLoading, LeaderEnd, MemberEnd, MemberError, MemberHello, MemberLoaded,
            ServeGroup, ToMember,
        },
    },
    layer::{SiteOp, SitePath},
    region::{Access, Region},
};

const GEOMETRY: GroupGeometry = GroupGeometry { members: 2, input_values: 64, output_values: 32 };

const SPIN: Duration = Duration::from_micros(50);

/// Offsets of the first member's count of posted calls and of its first call, in words.
const POSTED: usize = 16;
const FIRST_CALL: usize = 16 + 2 * 16;

/// A group, and the outputs of its members.
fn group() -> (GroupLeader, Vec<MemberOutputs>) {
    let outputs: Vec<_> = (0..GEOMETRY.members).map(|_| MemberOutputs::create(&GEOMETRY).unwrap()).collect();
    (GroupLeader::create(GEOMETRY, fds(&outputs), SPIN).unwrap(), outputs)
}

fn leader() -> GroupLeader {
    group().0
}

fn fds(outputs: &[MemberOutputs]) -> Vec<OwnedFd> {
    outputs.iter().map(|outputs| outputs.fd().try_clone_to_owned().unwrap()).collect()
}

fn fd(leader: &GroupLeader) -> OwnedFd {
    leader.fd().unwrap().try_clone_to_owned().unwrap()
}

fn member(leader: &GroupLeader, index: u32, outputs: MemberOutputs) -> GroupMember {
    GroupMember::join(fd(leader), GEOMETRY, (index, outputs), SPIN).unwrap()
}

fn forward(rows: u32) -> GroupCall {
    let work = GroupWork::Evaluate { part: None, op: SiteOp::Forward, path: SitePath::Fast };
    GroupCall { site: 3, work, rows, form: InputForm::F32, input: 0, output: 16, after: None }
}

#[test]
fn members_of_a_real_region_answer_many_calls_and_sleep_between_them() {
    let (mut leader, outputs) = group();
    let serve = |(index, outputs)| {
        let mut member = member(&leader, index, outputs);
        thread::spawn(move || {
            let mut calls = 0;
            while let Some(call) = member.next_call().unwrap() {
                let mut row = [0.0; 3];
                member.read_inputs(call.input, &mut row).unwrap();
                let out = member.outputs_mut(call.output, 3).unwrap();
                out.copy_from_slice(&row.map(|x| x * (index + 2) as f32));
                member.finish();
                calls += 1;
            }
            calls
        })
    };
    let threads: Vec<_> = (0..).zip(outputs).map(serve).collect();
    for round in 0..3000u16 {
        if round % 1000 == 999 {
            thread::sleep(Duration::from_millis(2));
        }
        let row = [f32::from(round), -1.5, f32::NAN];
        leader.write_inputs(0, &row);
        let posted = [0, 1].map(|member| leader.post(member, &forward(1)));
        for (member, calls) in posted.into_iter().enumerate() {
            leader.wait(calls);
            let mut out = [0.0; 2];
            leader.read_outputs(member, 16, &mut out);
            assert_eq!(out, [row[0] * (member + 2) as f32, row[1] * (member + 2) as f32]);
        }
    }
    drop(leader);
    threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), 3000));
}

#[test]
fn a_call_arrives_as_it_was_posted() {
    let (mut leader, mut outputs) = group();
    let mut member = member(&leader, 0, outputs.swap_remove(0));
    let after = leader.post(1, &forward(7));
    let work = GroupWork::Evaluate { part: Some(2), op: SiteOp::Backward, path: SitePath::Linear };
    let rows = GroupCall { work: GroupWork::ReadRows, ..forward(9) };
    let tiles = GroupCall { form: InputForm::Bf16Tiles(16), ..forward(5) };
    let few = GroupCall { form: InputForm::Bf16Tiles(5), ..forward(5) };
    for call in [GroupCall { work, after: None, ..forward(5) }, rows, tiles, few] {
        leader.post(0, &call);
        assert_eq!(member.next_call().unwrap(), Some(call));
        member.finish();
    }
    assert_eq!(after.count, 1);
}

#[test]
fn values_outside_of_the_areas_are_refused() {
    let (leader, mut outputs) = group();
    let mut member = member(&leader, 1, outputs.swap_remove(1));
    let mut values = [0.0; 32];
    for (first, count) in [(48, 17), (8, 1), (usize::MAX - 15, 32), (64, 1)] {
        let refused = member.read_inputs(first, &mut values[..count]).unwrap_err();
        assert!(matches!(refused, GroupViolation::Place { .. }), "{first} {count}: {refused}");
        assert!(member.write_inputs(first, &values[..count]).is_err());
    }
    for skipped in [64, usize::MAX] {
        assert!(member.read_inputs_after(16, skipped, &mut values[..1]).is_err());
    }
    for (first, count) in [(16, 17), (32, 1), (8, 1), (16, usize::MAX)] {
        assert!(member.outputs_mut(first, count).is_err());
    }
    assert_eq!(member.outputs_mut(16, 16).unwrap().len(), 16);
    assert!(member.read_inputs(48, &mut values[..16]).is_ok());
    assert!(member.read_inputs_after(16, 33, &mut values[..15]).is_ok());
}

#[test]
fn a_region_of_another_size_or_layout_is_refused() {
    let leader = leader();
    let outputs = || MemberOutputs::create(&GEOMETRY).unwrap();
    let join = |geometry, index| GroupMember::join(fd(&leader), geometry, (index, outputs()), SPIN);
    assert!(matches!(join(GEOMETRY, 2), Err(JoinGroupError::Member(2))));
    let other = GroupGeometry { members: 1, ..GEOMETRY };
    assert!(matches!(join(other, 0), Err(JoinGroupError::Region(_))));
    for wrong in [
        GroupGeometry { members: 0, ..GEOMETRY },
        GroupGeometry { members: 16, ..GEOMETRY },
        GroupGeometry { input_values: 0, ..GEOMETRY },
        GroupGeometry { output_values: 24, ..GEOMETRY },
    ] {
        assert!(matches!(join(wrong, 0), Err(JoinGroupError::Geometry(_))), "{wrong:?}");
        assert!(matches!(GroupLeader::create(wrong, vec![], SPIN), Err(GroupError::Geometry(_))));
    }
    let region = Region::map(fd(&leader), 1..=1 << 20, Access::ReadWrite).unwrap();
    region.words()[2].store(1, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(join(GEOMETRY, 0), Err(JoinGroupError::Layout)));
}

#[test]
fn outputs_of_another_number_or_size_are_refused_and_no_leader_can_write_them() {
    let (_, outputs) = group();
    let one = GroupLeader::create(GEOMETRY, fds(&outputs[..1]), SPIN);
    assert!(matches!(one, Err(GroupError::Outputs { found: 1, members: 2 })), "{one:?}");
    let wider = GroupGeometry { output_values: 48, ..GEOMETRY };
    assert!(matches!(GroupLeader::create(wider, fds(&outputs), SPIN), Err(GroupError::Region(_))));
    let fd = fds(&outputs).swap_remove(0);
    assert!(Region::map(fd, 1..=1 << 20, Access::ReadWrite).is_err());
}

#[test]
fn rows_in_an_unknown_form_are_refused() {
    for (form, rows) in [(4, 5), (17, 20), (300, 20), (15, 16)] {
        let (mut leader, mut outputs) = group();
        let region = Region::map(fd(&leader), 1..=1 << 20, Access::ReadWrite).unwrap();
        leader.post(0, &forward(rows));
        region.words()[FIRST_CALL + 12].store(form, std::sync::atomic::Ordering::Relaxed);
        let refused = member(&leader, 0, outputs.swap_remove(0)).next_call();
        assert_eq!(refused, Err(GroupViolation::Form(form)), "{rows}");
    }
}

#[test]
#[should_panic(expected = "at most 16 calls at once")]
fn a_leader_that_floods_a_member_has_made_a_mistake() {
    let mut leader = leader();
    for _ in 0..=DEPTH {
        leader.post(0, &forward(1));
    }
}

proptest! {
    #[test]
    fn a_leader_that_writes_anything_gets_no_panic(words in proptest::array::uniform13(any::<u32>()), posted in 1u32..40) {
        let (leader, mut outputs) = group();
        let region = Region::map(fd(&leader), 1..=1 << 20, Access::ReadWrite).unwrap();
        let relaxed = std::sync::atomic::Ordering::Relaxed;
        for (at, word) in words.iter().enumerate() {
            region.words()[FIRST_CALL + at].store(*word, relaxed);
        }
        // Without a call that waits for another member, which never does anything here.
        region.words()[FIRST_CALL + 10].store(u32::MAX, relaxed);
        region.words()[POSTED].store(posted, relaxed);
        let mut member = member(&leader, 0, outputs.swap_remove(0));
        match member.next_call() {
            Ok(Some(call)) => {
                let mut values = [0.0; 4];
                let _ = member.read_inputs(call.input, &mut values);
                let _ = member.outputs_mut(call.output, call.rows as usize);
            }
            Ok(None) => prop_assert!(posted <= DEPTH),
            Err(violation) => prop_assert!(!violation.to_string().is_empty()),
        }
    }
}

fn hello() -> MemberHello {
    MemberHello {
        layout_hash: LAYOUT_HASH,
        release: "1.2.3".to_owned(),
        device: 1,
        devices: 2,
        split: WeightSplit::Outputs.code(),
        model: "/models/base.gguf".to_owned(),
        random_weights: None,
        files: [7; 32],
        cores: vec![2, 3],
        memory_bytes: 1 << 30,
        pass_rows: 512,
    }
}

#[test]
fn the_start_of_a_member_goes_over_a_socket() {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (ours, theirs) = pair.unwrap();
    let (leader_end, member_end) = (LeaderEnd::over(ours), MemberEnd::over(theirs));
    leader_end.send(&ToMember::Hello(hello()), &[]).unwrap();
    let (ToMember::Hello(heard), _) = member_end.receive().unwrap().unwrap() else { panic!("a hello") };
    assert_eq!(heard, hello());
    for message in
        [FromMember::Loading(GroupLoading { done: 1, total: 2 }), FromMember::Refused("no memory".to_owned())]
    {
        member_end.send(&message, &[]).unwrap();
        assert_eq!(leader_end.receive().unwrap().unwrap().0, message);
    }
    let (leader, outputs) = group();
    let loaded = FromMember::Loaded(MemberLoaded { weight_bytes: 5 });
    assert!(member_end.send(&loaded, &[]).is_err(), "the outputs are missing");
    member_end.send(&loaded, &[outputs[0].fd()]).unwrap();
    let (message, sent) = leader_end.receive().unwrap().unwrap();
    assert_eq!((message, sent.len()), (loaded, 1));
    let serve = ServeGroup { precision: 1 };
    assert!(leader_end.send(&ToMember::Serve(serve), &[]).is_err(), "the region is missing");
    leader_end.send(&ToMember::Serve(serve), &[leader.fd().unwrap()]).unwrap();
    let (message, mut fds) = member_end.receive().unwrap().unwrap();
    assert_eq!(message, ToMember::Serve(serve));
    let outputs = outputs.into_iter().next().unwrap();
    assert!(GroupMember::join(fds.pop().unwrap(), GEOMETRY, (0, outputs), SPIN).is_ok());
}

#[test]
fn a_member_of_another_release_or_with_other_files_refuses_by_name() {
    assert_eq!(hello().check("1.2.3", &[7; 32]), Ok(()));
    let refused = hello().check("1.2.4", &[7; 32]).unwrap_err();
    assert!(matches!(refused, MemberError::Release { device: 1, .. }));
    assert!(refused.to_string().contains("1.2.4") && refused.to_string().contains("1.2.3"));
    let layout = MemberHello { layout_hash: 1, ..hello() };
    assert!(matches!(layout.check("1.2.3", &[7; 32]), Err(MemberError::Release { .. })));
    let refused = hello().check("1.2.3", &[8; 32]).unwrap_err().to_string();
    assert!(refused.contains("/models/base.gguf") && refused.contains("restart the executor"), "{refused}");
    assert_eq!(
        [0, 1, 2].map(WeightSplit::from_code),
        [Some(WeightSplit::Outputs), Some(WeightSplit::Layers), None]
    );
}
