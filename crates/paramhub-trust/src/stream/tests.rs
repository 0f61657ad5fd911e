use super::*;

/// Passes on what both ends have to say until neither has anything.
fn meet(caller: &mut StreamTls, listener: &mut StreamTls) -> io::Result<()> {
    loop {
        let (mut there, mut back) = (Vec::new(), Vec::new());
        caller.take_outgoing(&mut there);
        listener.absorb(&there)?;
        listener.take_outgoing(&mut back);
        caller.absorb(&back)?;
        if there.is_empty() && back.is_empty() {
            return Ok(());
        }
    }
}

fn ends() -> (StreamTls, StreamTls) {
    let listener = StreamListener::new().unwrap();
    (StreamTls::call().unwrap(), listener.begin().unwrap())
}

fn message(tls: &mut StreamTls) -> Vec<u8> {
    let mut message = vec![0; 100];
    let read = tls.read(&mut message).unwrap();
    message.truncate(read);
    message
}

#[test]
fn both_ends_get_the_same_keys_and_binding() {
    let (mut caller, mut listener) = ends();
    caller.write(b"hello").unwrap();
    meet(&mut caller, &mut listener).unwrap();
    assert_eq!(message(&mut listener), b"hello");
    listener.write(b"challenge").unwrap();
    meet(&mut caller, &mut listener).unwrap();
    assert_eq!(message(&mut caller), b"challenge");
    assert_eq!(caller.binding(), listener.binding());
    let (ours, theirs) = (caller.keys(), listener.keys());
    assert_eq!(ours.cipher, theirs.cipher);
    assert_eq!((ours.sending, ours.receiving), (theirs.receiving, theirs.sending));
    assert_ne!(ours.sending, ours.receiving);
    let expected = if has_aes() { Cipher::Aes128Gcm } else { Cipher::ChaCha20Poly1305 };
    assert_eq!(ours.cipher, expected, "the one that the caller computes faster");
    assert!(!format!("{ours:?}").contains(&format!("{:?}", ours.sending)), "keys stay out of logs");
}

#[test]
fn somebody_in_the_middle_has_two_bindings() {
    let (mut caller, mut middle_listens) = ends();
    let (mut middle_calls, mut listener) = ends();
    meet(&mut caller, &mut middle_listens).unwrap();
    meet(&mut middle_calls, &mut listener).unwrap();
    assert_ne!(caller.binding(), listener.binding());
    assert_ne!(caller.keys().sending, listener.keys().receiving);
}

#[test]
fn no_byte_behind_the_last_record_is_asked_for() {
    let (mut caller, mut listener) = ends();
    meet(&mut caller, &mut listener).unwrap();
    let mut bytes = Vec::new();
    listener.write(b"verdict").unwrap();
    listener.take_outgoing(&mut bytes);
    let length = bytes.len();
    bytes.extend(b"frames that follow");
    let mut at = 0;
    while caller.has_unread() || at == 0 {
        if at > 0 && message_is_here(&mut caller) {
            break;
        }
        let end = at + caller.wants();
        caller.absorb(&bytes[at..end]).unwrap();
        at = end;
    }
    assert_eq!(at, length);
}

fn message_is_here(tls: &mut StreamTls) -> bool {
    tls.read(&mut [0; 100]).is_ok_and(|read| read == 7)
}

#[test]
fn bytes_arrive_in_any_pieces() {
    let (mut caller, mut listener) = ends();
    caller.write(b"hello").unwrap();
    loop {
        let (mut there, mut back) = (Vec::new(), Vec::new());
        caller.take_outgoing(&mut there);
        there.chunks(3).for_each(|piece| listener.absorb(piece).unwrap());
        listener.take_outgoing(&mut back);
        back.iter().for_each(|byte| caller.absorb(&[*byte]).unwrap());
        if there.is_empty() && back.is_empty() {
            break;
        }
    }
    assert_eq!(message(&mut listener), b"hello");
}

#[test]
fn what_is_no_handshake_or_too_much_is_refused() {
    let refused = |bytes: &[u8]| {
        let (_, mut listener) = ends();
        let error = listener.absorb(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        error.to_string()
    };
    assert!(refused(b"PHUB and more").contains("does not encrypt its streams"));
    assert!(refused(&[22, 3, 1, 0x40, 0]).contains("does not encrypt"), "a record of 16 KiB");
    refused(&[&[22, 3, 1, 0, 4][..], &[9; 4]].concat());
    // A message whose end never comes.
    let (_, mut listener) = ends();
    let endless = [&[22, 3, 1, 0x0f, 0xff, 1, 0, 0xff, 0xff][..], &[0; 0x0ffb]].concat();
    let mut given = 0;
    let refused = loop {
        given += endless.len();
        match listener.absorb(&endless) {
            Ok(()) => {}
            Err(refused) => break refused,
        }
    };
    assert!(given <= HANDSHAKE_BYTES_MAX + endless.len(), "{given} bytes were taken: {refused}");
}

#[test]
fn an_altered_handshake_makes_no_keys() {
    let hello_bytes = {
        let (mut bytes, (mut caller, _)) = (Vec::new(), ends());
        caller.take_outgoing(&mut bytes);
        bytes.len()
    };
    // The order of the hello's parts is random, and its length differs. Its first bytes are the head of the record.
    for at in 5..hello_bytes {
        let (mut caller, mut listener) = ends();
        let (mut there, mut back) = (Vec::new(), Vec::new());
        caller.take_outgoing(&mut there);
        let altered = at.min(there.len() - 1);
        there[altered] ^= 1;
        // Not every byte is refused at once: the listener may wait for more, or ask for another hello.
        if listener.absorb(&there).is_ok() {
            listener.take_outgoing(&mut back);
            let _ = caller.absorb(&back).and_then(|()| meet(&mut caller, &mut listener));
        }
        let are_open = [&caller, &listener].map(|end| !end.connection.is_handshaking());
        assert_eq!(are_open, [false; 2], "byte {at}");
    }
}
