/* Instead of GnuTLS: CRIU sends pages over TLS with it, if it is told to. */
#include <stdlib.h>
#include "stand_in.h"

void (*gnutls_free)(void *) = free;

ABSENT(gnutls_bye)
ABSENT(gnutls_certificate_allocate_credentials)
ABSENT(gnutls_certificate_free_credentials)
ABSENT(gnutls_certificate_send_x509_rdn_sequence)
ABSENT(gnutls_certificate_server_set_request)
ABSENT(gnutls_certificate_set_x509_crl_file)
ABSENT(gnutls_certificate_set_x509_key_file)
ABSENT(gnutls_certificate_set_x509_system_trust)
ABSENT(gnutls_certificate_set_x509_trust_file)
ABSENT(gnutls_certificate_type_get)
ABSENT(gnutls_certificate_verification_status_print)
ABSENT(gnutls_certificate_verify_peers3)
ABSENT(gnutls_credentials_set)
ABSENT(gnutls_deinit)
ABSENT(gnutls_error_is_fatal)
ABSENT(gnutls_handshake)
ABSENT(gnutls_init)
ABSENT(gnutls_packet_deinit)
ABSENT(gnutls_packet_get)
ABSENT(gnutls_record_check_pending)
ABSENT(gnutls_record_recv)
ABSENT(gnutls_record_recv_packet)
ABSENT(gnutls_record_send)
ABSENT(gnutls_set_default_priority)
ABSENT(gnutls_strerror)
ABSENT(gnutls_transport_set_ptr)
ABSENT(gnutls_transport_set_pull_function)
ABSENT(gnutls_transport_set_push_function)
