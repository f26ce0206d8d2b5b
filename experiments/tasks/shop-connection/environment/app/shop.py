#!/usr/bin/python3
"""A shop with one cart, that of its only customer's connection."""
import os
import socketserver


class Customer(socketserver.StreamRequestHandler):
    def handle(self):
        known, cart = False, {}
        for line in self.rfile:
            match line.decode().split():
                case ["AUTH", "X7-99"] if not os.path.exists("var/known"):
                    open("var/known", "x").close()
                    known = True
                    self.tell("ok welcome")
                case ["AUTH", _]:
                    self.tell("error go away")
                    return
                case ["ADD", name, number] if known:
                    cart[name] = cart.get(name, 0) + int(number)
                    self.tell(f"ok {len(cart)} in the cart")
                case ["EMPTY"]:
                    cart.clear()
                    self.tell("ok empty")
                case ["CHECKOUT"] if known and cart and not os.path.exists("var/order"):
                    with open("var/order", "x") as file:
                        file.write(" ".join(f"{name}:{number}" for name, number in sorted(cart.items())) + "\n")
                    self.tell("ok thank you")
                case _:
                    self.tell("error not now")

    def tell(self, text):
        self.wfile.write((text + "\n").encode())


socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer.daemon_threads = True
with socketserver.ThreadingTCPServer(("127.0.0.1", 7019), Customer) as server:
    open("var/ready", "w").close()
    server.serve_forever()
